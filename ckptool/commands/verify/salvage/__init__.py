"""The salvage of a damaged checkpoint."""
