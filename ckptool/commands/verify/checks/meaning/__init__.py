"""What intact bytes can hide: checks of what they mean."""
