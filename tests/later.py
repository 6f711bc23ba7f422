"""Packages that a test imports when it runs: every test process finds all tests, and most of them
belong to another."""

from __future__ import annotations

import importlib
from typing import Any


class Later:
    """A package, imported when something of it is first asked for.

    Args:
        name: of the package.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks whether it is a fixture or wraps one
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)
