"""A model option for sweeps whose engines compute nothing."""

from __future__ import annotations


def load(path: str) -> None:
    """Never called: it is there to be named."""
    raise AssertionError(path)
