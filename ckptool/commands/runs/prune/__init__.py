"""Which steps of a run are removed, and which optimizers inside those that stay."""
