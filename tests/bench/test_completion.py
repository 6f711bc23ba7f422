"""The last write of a record: numbers that are none make it invalid, by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minivllm.bench.completion import complete
from minivllm.bench.records import storage
from minivllm.bench.records.figures import DeviceFigures, Devices
from minivllm.bench.records.measurement import Measurement
from minivllm.bench.records.schema import current


def completed(folder: Path, **figures: Any) -> dict[str, Any]:
    """The record of a measurement with these metrics."""
    measurement = Measurement("r", "c", "s", "arm", 0, str(folder), {"measure": {}})
    folder.mkdir()
    record = measurement.record("ok")
    for name, value in figures.items():
        setattr(record.metrics, name, value)
    storage.hand_over(folder, record)
    rows = [
        {"t_s": t, "phase": "measuring", "rss": 1, "cpu_fastest_mhz": 900.0} for t in (1.5, 2.5)
    ]
    status, message = complete(measurement, {"clocks": {"cpu_max_mhz": 3000.0}}, rows, (1.0, 3.0))
    written: dict[str, Any] = json.loads((folder / storage.RECORD).read_text())
    assert (written["status"], "; ".join(written["validity"]["reasons"])) == (status, message)
    return written


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_metric_that_is_no_measurement_makes_its_record_invalid(
    tmp_path: Path, value: float
) -> None:
    written = completed(tmp_path / "r", requests_per_s=value, output_tokens_per_s=3.0)
    assert written["status"] == "invalid" and written["error"]["type"] == "Invalid"
    assert written["validity"]["reasons"] == [
        f"metrics.requests_per_s is {value:.4g}: no measurement gives that"
    ]
    assert written["metrics"]["requests_per_s"] in (None, -1.0)


def test_a_record_has_the_digests_of_its_tables_and_a_slow_clock_is_noted(tmp_path: Path) -> None:
    written = completed(tmp_path / "r", output_tokens_per_s=3.0)
    assert written["status"] == "ok" and list(written["digests"]) == [storage.TELEMETRY]
    assert written["digests"] == storage.digests(tmp_path / "r")
    assert written["validity"]["notes"] == [
        "the CPU's fastest core ran at 900 MHz at most, 30 % of its own maximum of 3000 MHz, "
        "for the whole window"
    ]


def test_the_memory_of_each_device_is_what_was_seen_from_outside(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    measurement = Measurement("r", "c", "s", "arm", 0, str(folder), {"measure": {}})
    record = measurement.record("ok")
    assert "devices" not in record.to_dict()
    record.devices = Devices(count=2, each=[DeviceFigures("A"), DeviceFigures("B")])
    storage.hand_over(folder, record)
    rows = [
        {"t_s": t, "phase": "measuring", "gpu_memory_used_0": 7, "gpu_process_memory_1": 10 * t}
        for t in (1.0, 2.0, 3.0)
    ]
    complete(measurement, {}, rows, (1.0, 3.0))
    written = current(json.loads((folder / storage.RECORD).read_text()))
    first, second = written["devices"]["each"]
    assert (first["name"], first["memory_used"], first["memory_process"]) == ("A", 7, None)
    assert (second["name"], second["memory_used"], second["memory_process"]) == ("B", None, 30)
