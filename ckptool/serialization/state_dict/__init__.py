"""State dicts: their names, their values, and one out of what all ranks hold."""
