"""What is left of a damaged checkpoint."""
