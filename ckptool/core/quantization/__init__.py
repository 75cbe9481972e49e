"""Quantized tensors: find them by names and types, and replace them with numbers."""
