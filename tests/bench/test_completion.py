"""The last write of a record: numbers that are none make it invalid, by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minivllm.bench.completion import complete
from minivllm.bench.records import storage
from minivllm.bench.records.measurement import Measurement


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
