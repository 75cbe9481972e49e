"""Quantized tensors: find them by names and types, and lay out numbers in their place."""
