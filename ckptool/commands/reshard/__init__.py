"""A checkpoint for a new device mesh."""
