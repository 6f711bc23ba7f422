"""What ranks take is in the record: memory of all of them, collectives, and time in these."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from minivllm.bench.driver import drive
from minivllm.bench.hardware.clock import Clock
from minivllm.bench.metrics.rows import breakdown
from minivllm.bench.workloads.arrivals import Offline
from minivllm.bench.workloads.workload import Workload, WorkloadRequest
from minivllm.config.compose import compose
from minivllm.engine.options import SamplingParams
from minivllm.engines.minivllm.engine import MinivllmEngine
from minivllm.engines.minivllm.rank_use import RankUse
from minivllm.parallel.ranks import Traffic
from minivllm.platform.threads import allowed_cores
from tests.forked import fork_known

usable = allowed_cores()
KNOBS = ("runtime.threads=1", "runtime.device=cpu", "cache.num_blocks=16")
ASKED = Workload((WorkloadRequest("r", (5, 6, 7), 8, ignore_eos=True),))


def test_two_ranks_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    one = MinivllmEngine(compose([*KNOBS]))
    fork_known(monkeypatch)
    two = MinivllmEngine(compose([*KNOBS, "parallel.tensor=2"]))
    try:
        for name, size in one.info.memory.items():
            assert size and two.info.memory[name] == pytest.approx(size, rel=0.01), name
        for streamed in ("streamed_weight_bytes", "kv_bytes_per_token", "head_flops_per_row"):
            half = one.info.model[streamed] / 2
            assert two.info.model[streamed] == pytest.approx(half, rel=0.01), streamed
        assert two.info.vocab_size == one.info.vocab_size
        two.reset()
        drive(two, ASKED, Offline(), SamplingParams(), Clock())
        steps, counted = two.steps(), two.liveness()["parallel"]
        layers = len(two.engine.loaded.model.model.layers)
        # Two sums a layer, one for the embedding, and the logits.
        assert counted["collectives"] == len(steps) * (2 * layers + 2)
        assert counted["ranks"] == 2 and float(counted["collective_bytes"]) > 0
        mean = breakdown(steps)
        assert mean.collective_ms is not None and mean.forward_ms is not None
        assert 0 < mean.collective_ms <= mean.forward_ms
        assert counted["placed_at"] == ",".join(map(str, sorted(usable)))
    finally:
        two.close()
    assert "parallel" not in one.liveness()
    assert breakdown(one.steps()).collective_ms is None


@pytest.mark.parametrize(
    ("named", "size", "here", "devices"),
    [
        ("cuda:1", 1, 1, "cuda:1"),
        ("cuda", 2, 2, "cuda:0,1"),
        ("auto", 3, 3, "cuda:0,1,2"),
        ("cuda:1,3", 2, 2, "cuda:1,3"),
        ("cuda", 4, 2, "cuda:0,1"),  # the other two are another machine's
    ],
)
def test_the_gpus_of_ranks_are_named(named: str, size: int, here: int, devices: str) -> None:
    ranks = SimpleNamespace(size=size, on_this_machine=here, traffic=Traffic(seconds=1.0))
    use = RankUse.__new__(RankUse)
    use._ranks, use._runtime = ranks, {"device": named}
    use._device = torch.device("cuda:1" if size == 1 else "cuda:0")
    assert use.devices == use.placed_at == devices
    assert use.take_ms() is None  # the host does not wait for collectives there
