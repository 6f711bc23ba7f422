"""One measurement on a device at a time."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock

from minivllm.bench.gpu import open_gpu
from minivllm.bench.measurement import SIMULATED


@contextlib.contextmanager
def device_lock(config: dict[str, Any], waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the device, so that no two supervisors on this machine measure on it at once.

    Simulations use none, and go on side by side.

    Args:
        config: the resolved configuration.
        waiting: called once if another supervisor holds the device.
    """
    if (config.get("engine") or {}).get("_target_") == SIMULATED:
        yield
        return
    uuid = open_gpu((config.get("runtime") or {}).get("device") or "auto").describe().get("uuid")
    name = re.sub(r"[^A-Za-z0-9-]", "-", uuid or "cpu")
    lock = filelock.FileLock(Path(tempfile.gettempdir()) / f"minivllm-{name}.lock", mode=0o666)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        waiting()
        lock.acquire(poll_interval=0.2)
    try:
        yield
    finally:
        lock.release()
