"""Experiments: the choice and the order of the cells that a command measures."""
