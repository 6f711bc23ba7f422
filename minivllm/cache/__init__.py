"""The KV cache: blocks, who owns them, and the tensors behind them; one cache policy a file."""
