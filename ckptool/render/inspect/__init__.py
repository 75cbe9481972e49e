"""What inspect shows."""
