"""Whether bytes are as they were written."""
