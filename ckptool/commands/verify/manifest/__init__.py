"""A manifest of a checkpoint, and a checkpoint against it."""
