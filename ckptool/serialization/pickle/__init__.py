"""Pickles: read without running them, and written without their tensors."""
