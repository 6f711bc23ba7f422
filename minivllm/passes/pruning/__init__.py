"""What of a model can be left out: layers, MLP channels, heads, or single weights."""
