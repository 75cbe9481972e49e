"""What verify shows."""
