"""What processes that are started here have in common. Torch-free."""

from __future__ import annotations

import os
import sys


def module_path() -> str:
    """PYTHONPATH for a process that is to find what this one finds, a user's own classes included."""
    return os.pathsep.join(dict.fromkeys(entry or os.getcwd() for entry in sys.path))
