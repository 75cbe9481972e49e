"""The code that runs on each rank of the benchmark."""
