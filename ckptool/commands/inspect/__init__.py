"""What a checkpoint holds, from its metadata alone."""
