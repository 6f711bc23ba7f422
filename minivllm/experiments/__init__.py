"""Experiments: which cells are measured, in which order."""
