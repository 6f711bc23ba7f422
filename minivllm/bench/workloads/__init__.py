"""Workloads: requests, and when they are due."""
