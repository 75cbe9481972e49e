"""Key maps: the names and tensors of one layout in terms of another's."""
