"""Reading the bytes of tensors into memory."""
