"""Events beside a record come back as they were, or one line says why not."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from minivllm.bench.records.events import has_events, read_events, write_events
from minivllm.bench.records.storage import EVENTS, TELEMETRY, digests
from minivllm.bench.records.tables import damaged_tables
from minivllm.errors import BadInput
from minivllm.platform.files import write_parquet

BUNDLES: list[dict[str, Any]] = [
    {"time_s": 5.0, "end_s": 5.0, "engine": {"version": 1}},
    {"time_s": 5.1, "end_s": 5.25, "step": 0, "sizes": [[0, 7, 6]]},
    {"time_s": 5.25, "end_s": 5.5, "step": 1, "new": [[1, "a/b", 3, 8, 0, 5.2, None]]},
]


def written(directory: Path, bundles: list[dict[str, Any]] = BUNDLES) -> Path:
    write_events(directory, [json.dumps(bundle).encode() for bundle in bundles])
    return directory


def telemetry(t_s: float, **columns: Any) -> dict[str, Any]:
    return {"t_s": t_s, "phase": "measuring", "rss": 100, "gpu_process_memory": None, **columns}


def test_bundles_come_back_as_they_were(tmp_path: Path) -> None:
    assert not has_events(tmp_path)
    written(tmp_path)
    assert has_events(tmp_path) and read_events(tmp_path) == BUNDLES
    assert digests(tmp_path).keys() == {EVENTS}
    assert read_events(tmp_path, digests(tmp_path)) == BUNDLES


def test_telemetry_of_the_window_is_merged_in_by_time(tmp_path: Path) -> None:
    write_parquet(
        written(tmp_path) / TELEMETRY,
        [
            telemetry(4.9),
            telemetry(5.2, gpu_power_w=300.0, gpu_process_memory=7),
            telemetry(5.3, gpu_power_w=None),
            telemetry(5.6),
        ],
    )
    first = {"gauges": {"time_s": 5.2, "memory_bytes": 7, "watts": 300.0}}
    second = {"gauges": {"time_s": 5.3, "memory_bytes": 100}}
    assert read_events(tmp_path) == [BUNDLES[0], first, BUNDLES[1], second, BUNDLES[2]]


def test_a_run_without_events_names_the_knob(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"has no events: .* measure\.events=true"):
        read_events(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "does not begin with the state"),
        (b"no zstd", "is torn"),
        ([{"time_s": 2.0, "end_s": 1.0}], "holds no events"),
        ([{"step": 1}], "holds no events"),
        ([[1]], "holds no events"),
        (BUNDLES[1:], "does not begin with the state"),
        ([{**BUNDLES[0], "engine": {"version": 99}}], "in version 1"),
    ],
)
def test_what_are_no_events_is_one_line(tmp_path: Path, content: Any, message: str) -> None:
    if isinstance(content, list):
        written(tmp_path, content)
    elif content:
        (tmp_path / EVENTS).write_bytes(content)
    else:
        written(tmp_path, [])
    with pytest.raises(BadInput, match=message) as raised:
        read_events(tmp_path)
    assert EVENTS in str(raised.value) and "\n" not in str(raised.value)


def test_other_events_than_were_recorded_are_told(tmp_path: Path) -> None:
    path = written(tmp_path) / EVENTS
    recorded = {EVENTS: hashlib.sha256(b"others").hexdigest()}
    with pytest.raises(BadInput, match="its digest is another"):
        read_events(tmp_path, recorded)
    row = {
        "status": "ok",
        "directory": str(tmp_path),
        "slimmed": ["requests.parquet", "steps.parquet"],
        f"digests.{EVENTS}": recorded[EVENTS],
    }
    assert damaged_tables(row) == [str(path)]
    assert damaged_tables({**row, f"digests.{EVENTS}": digests(tmp_path)[EVENTS]}) == []
