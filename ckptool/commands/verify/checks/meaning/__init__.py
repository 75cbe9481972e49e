"""What sound bytes can hide: checks of what they mean."""
