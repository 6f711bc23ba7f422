"""The trace by its structure: what Perfetto and Chrome ask of one, and what it says of a run."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest

from minivllm.engine.batching import Continuous
from minivllm.report.view.account import Account
from minivllm.report.view.trace import ENGINE, REQUESTS, TRIMONTH_S, chrome_trace
from tests.engine.imaginary import make
from tests.report.view.recording import recorded_slowly


@pytest.fixture(scope="module")
def items() -> list[dict[str, Any]]:
    """A run with preemptions, whose steps take a quarter of a second."""
    machine = make(Continuous(4, 8, watermark=0), blocks=10)
    recorded = recorded_slowly(machine)
    for index in range(6):
        machine.add([index + 1] * (5 + index), 8)
    machine.run()
    gauges = {"time_s": recorded[3]["end_s"], "memory_bytes": 5, "watts": 1.5}
    return [*recorded[:4], {"gauges": gauges}, *recorded[4:]]


def of_kind(trace: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == kind]


def test_tracks_are_named_and_their_slices_lie_within_each_other(
    items: list[dict[str, Any]],
) -> None:
    trace = json.loads(json.dumps(chrome_trace(items, None)))
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X", "C", "s", "f"}
    named = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in of_kind(trace, "M")
        if event["name"] == "thread_name"
    }
    tracks: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in of_kind(trace, "X"):
        assert event["dur"] >= 0
        tracks[event["pid"], event["tid"]].append(event)
    assert tracks.keys() == named.keys() and len(tracks) == 1 + 6
    steps = tracks.pop((ENGINE, 1))
    assert len(steps) == sum("step" in item for item in items)
    assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(steps))
    for track in tracks.values():
        whole, *parts = track
        assert whole["args"]["finish_reason"] == "length"
        assert sum(part["dur"] for part in parts) == pytest.approx(whole["dur"])
        assert parts[0]["ts"] == whole["ts"]
        assert all(a["ts"] + a["dur"] == pytest.approx(b["ts"]) for a, b in pairwise(parts))
    assert named[REQUESTS, 1] == "0.0"


def test_slices_are_the_account_of_each_request(items: list[dict[str, Any]]) -> None:
    trace, account = chrome_trace(items, None), Account.of(items)
    for number, life in account.lives.items():
        track = [e for e in of_kind(trace, "X") if (e["pid"], e["tid"]) == (REQUESTS, number + 1)]
        assert track[0]["dur"] == pytest.approx(1e3 * sum(life.ms.values()))


def test_a_preemption_is_an_arrow_between_slices_that_are_there(
    items: list[dict[str, Any]],
) -> None:
    trace = chrome_trace(items, None)
    starts, ends = of_kind(trace, "s"), of_kind(trace, "f")
    told = [one for item in items for one in item.get("preempted", ())]
    assert len(starts) == len(ends) == len(told) > 0
    slices = of_kind(trace, "X")
    for start, end, (number, needed_by, _) in zip(starts, ends, told, strict=True):
        assert start["id"] == end["id"] and end["bp"] == "e"
        assert (start["tid"], end["tid"]) == (needed_by + 1, number + 1)
        (waits,) = [
            e
            for e in slices
            if (e["tid"], e["ts"], e["name"]) == (number + 1, end["ts"], "preempted")
        ]
        assert waits["dur"] > 0
        assert any(
            e["pid"] == REQUESTS and e["tid"] == needed_by + 1 and e["ts"] == start["ts"]
            for e in slices
        )
    assert len({event["id"] for event in starts}) == len(starts)


def test_counters_follow_the_state(items: list[dict[str, Any]]) -> None:
    counters: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in of_kind(chrome_trace(items, None), "C"):
        counters[event["name"]].append(event["args"])
    assert counters.keys() == {"requests", "used blocks", "output tokens/s", "memory", "power"}
    assert max(one["running"] for one in counters["requests"]) == 4
    assert counters["requests"][-1] == {"running": 0, "waiting": 0}
    assert max(one["blocks"] for one in counters["used blocks"]) == 10
    assert counters["memory"] == [{"bytes": 5}] and counters["power"] == [{"watts": 1.5}]
    assert sum(one["tokens"] for one in counters["output tokens/s"]) > 0


def test_times_count_from_where_torch_counts(items: list[dict[str, Any]]) -> None:
    unix_s = 1_764_000_000.5
    trace = chrome_trace(items, unix_s)
    base_s = trace["baseTimeNanoseconds"] / 1e9
    assert base_s % TRIMONTH_S == 0 and 0 < unix_s - base_s < TRIMONTH_S
    first = of_kind(trace, "X")[0]
    step = next(item for item in items if "step" in item)
    assert base_s + first["ts"] / 1e6 == pytest.approx(unix_s + step["time_s"], abs=1e-3)
