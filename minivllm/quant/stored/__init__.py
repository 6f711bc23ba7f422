"""Quantised checkpoints: one stored format a file."""
