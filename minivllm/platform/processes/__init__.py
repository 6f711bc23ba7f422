"""Processes that this one starts: their end with it, their output, and messages to them."""
