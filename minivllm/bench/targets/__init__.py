"""Engines under test behind one interface."""
