"""Key maps and model configurations: which is asked for, and which goes with a checkpoint."""
