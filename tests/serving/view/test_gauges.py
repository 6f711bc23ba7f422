"""What a server uses of its machine."""

from __future__ import annotations

import json
import time
from typing import Any, cast

import psutil
import pytest

from minivllm.bench.hardware.gpu import NullGpu
from minivllm.serving.view.gauges import Gauges


def read(gpu: NullGpu) -> dict[str, Any]:
    own = psutil.Process()
    (item,) = json.loads(Gauges(lambda: [own.ppid()], lambda: [own.pid], gpu).read())
    return cast(dict[str, Any], item["gauges"])


def test_on_a_cpu_all_processes_count() -> None:
    gauges = read(NullGpu())
    own = psutil.Process().memory_info().rss
    parent = psutil.Process(psutil.Process().ppid()).memory_info().rss
    # this process stands for an API server, too
    assert gauges["memory_bytes"] == pytest.approx(2 * own + parent, rel=0.1)
    assert abs(gauges["time_s"] - time.monotonic()) < 60 and "watts" not in gauges


@pytest.mark.parametrize(
    ("own", "memory"), [(700, 700), (None, 900)], ids=["its own", "the whole GPU's"]
)
def test_a_gpu_tells_memory_and_power(own: int | None, memory: int) -> None:
    class OneGpu(NullGpu):
        def sample(self, pids: Any) -> dict[str, float | int | None]:
            assert pids == {psutil.Process().ppid()}
            return {"gpu_process_memory": own, "gpu_memory_used": 900, "gpu_power_w": 55.5}

    gauges = read(OneGpu())
    assert gauges["memory_bytes"] == memory and gauges["watts"] == 55.5
