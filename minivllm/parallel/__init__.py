"""Parallelism: how many processes compute, and how they share the work."""
