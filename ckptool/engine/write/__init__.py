"""Bytes of tensors into files, whole or not at all."""
