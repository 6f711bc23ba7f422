"""Workloads that are read: prompts of one's own and traces."""
