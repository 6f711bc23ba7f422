"""Loading: from a checkpoint on disk or a seed to a model and its tokenizer."""
