"""Speculative decoding: what proposes draft tokens for the model to verify."""
