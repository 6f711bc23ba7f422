"""What processes that are started here have in common. Torch-free."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys


def module_path() -> str:
    """PYTHONPATH for a process that is to find what this one finds, a user's own classes
    included."""
    return os.pathsep.join(dict.fromkeys(entry or os.getcwd() for entry in sys.path))


PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """End when the supervisor ends, also if it is killed: an orphan would hold the device
    unnoticed."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
