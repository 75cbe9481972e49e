"""Files that lie in others, in memory, or in several folders at once."""
