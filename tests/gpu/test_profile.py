"""A trace of a GPU has its kernels, also those of replayed graphs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minivllm.bench.records import storage
from tests.bench.test_profile import PHASES, events_of, ranges_of, session_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("graphs", ["true", "false"])
def test_a_trace_has_the_kernels_of_its_steps(tmp_path: Path, graphs: str) -> None:
    session, measurement = session_of(
        tmp_path,
        "workload.output_len=6",
        "quant=bf16",
        "runtime.device=cuda",
        f"runtime.cuda_graphs={graphs}",
    )
    result = session.measure(measurement)
    session.profile(measurement)
    events = events_of(measurement.path)
    assert [event["name"] for event in ranges_of(events)] == PHASES * len(result.steps)
    kernels = [event for event in events if event.get("cat") == "kernel"]
    assert len(kernels) > len(result.steps)
    table = (measurement.path / storage.OPERATIONS).read_text()
    assert any(f"`{event['name'][:40]}" in table for event in kernels) and "aten::" not in table
    idle = json.loads((measurement.path / storage.IDLE).read_text())
    assert 0 <= idle["whole"]["share"] < 1 and idle["whole"]["steps"] == len(result.steps)
    # Of every step it is known which kernels it launched, also where they are those of one graph.
    assert idle["decoding"]["requests"] == 3 and idle["decoding"]["steps"] == len(result.steps) - 2
    assert 0 < idle["decoding"]["between"] < 1 and 0 <= idle["decoding"]["within"] < 1
    session.close()
