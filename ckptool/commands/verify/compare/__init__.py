"""One checkpoint against another."""
