"""How many threads the CPU's kernels take. Torch-free."""

from __future__ import annotations

import os
from typing import Any

import psutil

from minivllm.errors import BadInput


def usable_cores() -> int:
    """Logical cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_count(runtime: dict[str, Any]) -> int:
    """`runtime.threads`, or $MINIVLLM_THREADS, or all physical cores that the process may use.

    Not $OMP_NUM_THREADS: joblib and Ray set it for what they start, and the same cell would differ between launchers.
    """
    if wanted := runtime.get("threads") or usual_threads():
        return int(wanted)
    return max(1, min(psutil.cpu_count(logical=False) or 1, usable_cores()))


def usual_threads() -> int | None:
    """What the environment asks for where `runtime.threads` says nothing. Raises BadInput."""
    told = os.environ.get("MINIVLLM_THREADS")
    if not told:
        return None
    if not told.isdecimal() or not int(told):
        raise BadInput(f"MINIVLLM_THREADS={told!r} must be a number of at least 1; or set runtime.threads")
    return int(told)
