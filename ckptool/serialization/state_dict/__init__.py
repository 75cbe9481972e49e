"""State dicts: their names, their values, and the one that all ranks' parts form."""
