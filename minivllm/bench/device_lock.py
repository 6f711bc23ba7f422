"""One measurement on a device at a time."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from minivllm.bench.hardware.gpu import open_gpu
from minivllm.bench.records.lock import HolderLock
from minivllm.bench.records.measurement import SIMULATED


@contextlib.contextmanager
def device_lock(
    config: dict[str, Any], waiting: Callable[[str], None] = lambda holder: None
) -> Iterator[None]:
    """Hold the device, so that no two supervisors on this machine measure on it at once.

    Simulations use none, and go on side by side.

    Args:
        config: the resolved configuration.
        waiting: called once if another supervisor holds the device, with who and since when; ""
            where that is not known.

    Raises:
        BadInput: the lock file cannot be used.
    """
    if (config.get("engine") or {}).get("_target_") == SIMULATED:
        yield
        return
    device = (config.get("runtime") or {}).get("device") or "auto"
    name = re.sub(r"[^A-Za-z0-9-]", "-", open_gpu(device).describe().get("uuid") or "cpu")
    path = Path(tempfile.gettempdir()) / f"minivllm-{name}.lock"
    lock = HolderLock(path, f"runtime.device={device}", mode=0o666)
    if not lock.acquire():
        waiting(lock.holder())
        lock.acquire(wait=True)
    try:
        yield
    finally:
        lock.release()
