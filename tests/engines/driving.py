"""What tests of peers share: a load of given prompts, and a drive of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from minivllm import SamplingParams
from minivllm.bench.driver import drive
from minivllm.bench.hardware.clock import Clock
from minivllm.bench.metrics.request_trace import RequestTrace
from minivllm.bench.workloads.arrivals import Offline
from minivllm.bench.workloads.workload import Workload, WorkloadRequest
from minivllm.engines.base import BenchEngine


def requests(
    prompts: Iterable[Sequence[int]], lengths: Iterable[int], ignore_eos: bool = True
) -> Workload:
    """Requests r0, r1, ... of these prompts and so many output tokens."""
    return Workload(
        tuple(
            WorkloadRequest(f"r{i}", tuple(prompt), length, ignore_eos)
            for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        )
    )


def run(
    engine: BenchEngine, load: Workload, arrival: Any = None, **params: Any
) -> list[RequestTrace]:
    """Drive the engine through a load, all at once unless there is an arrival process."""
    return drive(engine, load, arrival or Offline(), SamplingParams(**params), Clock())
