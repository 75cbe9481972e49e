"""Key maps: one layout's names and tensors in terms of another's."""
