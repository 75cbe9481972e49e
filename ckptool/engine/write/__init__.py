"""Writing the bytes of tensors into files, completely or not at all."""
