"""How the worker tells failures apart, and what it makes of steps."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from minivllm.bench import worker
from minivllm.bench.metrics.rows import breakdown, kv_waste
from minivllm.errors import BadInput, classify


class OutOfMemoryError(RuntimeError):
    """Named as torch names its own."""


def chained() -> Exception:
    try:
        try:
            raise MemoryError
        except MemoryError as error:
            raise ValueError("while loading") from error
    except ValueError as error:
        return error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BadInput("no"), "invalid"),
        (MemoryError(), "oom"),
        (OutOfMemoryError("x"), "oom"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            "oom",
        ),
        (RuntimeError("CUDA error: out of memory"), "oom"),
        (chained(), "oom"),
        (RuntimeError("shapes do not match"), "error"),
        (ValueError("out of memory of what happened"), "error"),
        (KeyError("x"), "error"),
    ],
)
def test_classify(error: Exception, status: str) -> None:
    assert classify(error) == status


def test_the_pipe_speaks_json_lines() -> None:
    read_end, write_end = os.pipe()
    pipe = worker.Pipe(write_end)
    pipe("measuring", tokens=3)
    pipe("failed", message="two\nlines")
    lines = os.read(read_end, 1000).decode().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"event": "measuring", "tokens": 3},
        {"event": "failed", "message": "two\nlines"},
    ]
    os.close(read_end)
    os.close(write_end)


def test_a_worker_without_its_parent_ends() -> None:
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-m", "minivllm.bench.worker", "1", "999999999"],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
    )
    assert done.returncode == 1 and done.stderr == b""


def test_breakdown_is_the_mean_of_what_is_known() -> None:
    result = breakdown([{"forward_ms": 1.0, "gap_ms": None}, {"forward_ms": 3.0, "gap_ms": 5.0}])
    assert (result.steps, result.forward_ms, result.gap_ms, result.sample_ms) == (2, 2.0, 5.0, None)
    assert breakdown([]).forward_ms is None and breakdown([]).collective_share is None


def test_the_share_of_communication_is_one_of_the_whole_step() -> None:
    steps = [
        {"schedule_ms": 1.0, "forward_ms": 8.0, "gap_ms": 1.0, "collective_ms": 2.0},
        {"schedule_ms": 1.0, "forward_ms": 18.0, "gap_ms": None, "collective_ms": 5.5},
    ]
    # 3.75 ms of a mean step of 1 + 13 + 1 ms
    assert breakdown(steps).collective_share == pytest.approx(0.25)


def test_waste_is_the_mean_share() -> None:
    steps = [
        {"kv_slots_wasted": 1, "kv_slots_allocated": 4},
        {"kv_slots_wasted": 3, "kv_slots_allocated": 4},
    ]
    assert kv_waste([*steps, {"kv_slots_wasted": 0, "kv_slots_allocated": 0}]) == 0.5
    assert kv_waste([{}]) is None
