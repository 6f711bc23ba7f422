"""Metrics: what is computed from the stamps of a measurement, and whether it may be quoted."""
