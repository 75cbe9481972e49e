"""The archives that torch.save writes, and the tensors in them."""
