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


def locks(config: dict[str, Any]) -> bool:
    """Whether measurements of a resolved configuration wait for a device."""
    return (config.get("engine") or {}).get("_target_") != SIMULATED


@contextlib.contextmanager
def device_lock(
    config: dict[str, Any], waiting: Callable[[str], None] = lambda holder: None
) -> Iterator[None]:
    """Hold the device, or each of several, so that no two supervisors on this machine measure on
    one at once.

    Simulations use none, and go on side by side.

    Args:
        config: the resolved configuration.
        waiting: called if another supervisor holds a device, with who and since when; "" where that
            is not known.

    Raises:
        BadInput: the lock file cannot be used.
    """
    if not locks(config):
        yield
        return
    device = (config.get("runtime") or {}).get("device") or "auto"
    gpu = open_gpu(device)
    names = {str(one.describe().get("uuid") or "cpu") for one in gpu.each or (gpu,)}
    with contextlib.ExitStack() as held:
        for name in sorted(names):  # in one order, so that no two wait for each other
            plain = re.sub(r"[^A-Za-z0-9-]", "-", name)
            path = Path(tempfile.gettempdir()) / f"minivllm-{plain}.lock"
            lock = HolderLock(path, f"runtime.device={device}", mode=0o666)
            if not lock.acquire():
                waiting(lock.holder())
                lock.acquire(wait=True)
            held.callback(lock.release)
        yield
