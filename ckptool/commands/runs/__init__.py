"""The steps of a run: which there are, which of them are good, and which may go."""
