"""Attention: one backend a file behind one protocol."""
