"""Key maps and model configurations: choosing a map, and the files that go with a model."""
