"""Bytes of tensors into memory."""
