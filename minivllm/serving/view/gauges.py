"""What a server uses of its machine, for those who watch."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil

from minivllm.bench.hardware.gpu import NullGpu


class Gauges:
    """Reads memory and power.

    Args:
        engines: gives the process ids of the engine's replicas, of which some may come and go.
        others: gives those of the server's further processes beside this one.
        gpu: of the engine, or a null object.
    """

    def __init__(
        self,
        engines: Callable[[], Sequence[int]],
        others: Callable[[], Sequence[int]],
        gpu: NullGpu,
    ) -> None:
        self._gpu, self._engines, self._others = gpu, engines, others

    def read(self) -> str:
        """A list with one item, in JSON: `{"gauges": {"time_s", "memory_bytes", "watts"}}`.

        The memory is that of the engine on its GPU, on a CPU what all processes of the server have
        in memory; watts are there where the GPU tells them. A reading on the engine's clock.
        """
        engines = self._engines()
        row = self._gpu.sample(set(engines))
        memory = row.get("gpu_process_memory") or row.get("gpu_memory_used")
        gauges = {
            "time_s": time.monotonic(),
            "memory_bytes": memory or _resident([os.getpid(), *engines, *self._others()]),
        }
        if (watts := row.get("gpu_power_w")) is not None:
            gauges["watts"] = watts
        return json.dumps([{"gauges": gauges}], separators=(",", ":"))


def _resident(pids: Sequence[int]) -> int:
    total = 0
    for pid in pids:
        with suppress(psutil.Error):  # the engine has ended
            total += psutil.Process(pid).memory_info().rss
    return total
