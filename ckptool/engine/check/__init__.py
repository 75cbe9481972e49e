"""Whether bytes are what they were when they were written."""
