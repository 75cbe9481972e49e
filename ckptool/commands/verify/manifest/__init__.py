"""The manifest of a checkpoint, and the comparison of a checkpoint with it."""
