"""What describes a model beside its tensors: its config.json, its tokenizer, an adapter's own."""
