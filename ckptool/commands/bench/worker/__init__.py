"""What runs on each rank of the benchmark."""
