"""Packed weights that are kept for the next start: their identity, their files, their folder."""
