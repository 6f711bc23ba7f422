"""Eviction: which cached blocks a request gives up."""
