"""Compression: how keys and values are stored in fewer bits."""
