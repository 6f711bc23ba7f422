"""Start and end of child processes: their module path, and their death with the parent. Torch-
free."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys


def module_path() -> str:
    """A PYTHONPATH with which a child process imports the same modules, a user's own included."""
    return os.pathsep.join(dict.fromkeys(entry or os.getcwd() for entry in sys.path))


PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """End this process when its parent ends, also by a kill, since an orphan would hold the device.

    Args:
        parent: process id of the parent.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
