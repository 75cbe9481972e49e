"""Choosing, checking and applying key maps."""
