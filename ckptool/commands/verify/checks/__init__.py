"""What is looked at in one checkpoint."""
