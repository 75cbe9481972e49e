"""What the elements of a tensor are computed as, of those of other tensors."""
