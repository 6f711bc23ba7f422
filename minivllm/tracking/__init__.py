"""Trackers: who else is told of a record."""
