"""Passes: what changes a loaded model."""
