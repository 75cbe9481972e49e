"""What a checkpoint holds, from its metadata, and what its tensors come to."""
