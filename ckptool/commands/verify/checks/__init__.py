"""The checks of one checkpoint."""
