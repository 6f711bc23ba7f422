"""What a server uses of its machine, for those who watch."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil

from minivllm.bench.hardware.gpu import NullGpu


class Gauges:
    """Reads memory and power.

    Args:
        engines: process ids of the engine's replicas.
        gpu: of the engine, or a null object.
    """

    def __init__(self, engines: Sequence[int], gpu: NullGpu) -> None:
        self._gpu = gpu
        self._processes = [psutil.Process(), *map(psutil.Process, engines)]

    def read(self) -> str:
        """A list with one item, in JSON: `{"gauges": {"time_s", "memory_bytes", "watts"}}`.

        The memory is that of the engine on its GPU, on a CPU what all processes of the server have
        in memory; watts are there where the GPU tells them. A reading on the engine's clock.
        """
        row = self._gpu.sample({one.pid for one in self._processes[1:]})
        memory = row.get("gpu_process_memory") or row.get("gpu_memory_used")
        gauges = {"time_s": time.monotonic(), "memory_bytes": memory or self._resident()}
        if (watts := row.get("gpu_power_w")) is not None:
            gauges["watts"] = watts
        return json.dumps([{"gauges": gauges}], separators=(",", ":"))

    def _resident(self) -> int:
        total = 0
        for process in self._processes:
            with suppress(psutil.Error):  # the engine has ended
                total += process.memory_info().rss
        return total
