"""What bench shows."""
