"""Conversations in a terminal: what is typed, answered and shown."""
