"""Checkpoints that were quantised before: one stored format a file."""
