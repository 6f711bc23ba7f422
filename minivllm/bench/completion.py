"""The parent's part of a record: what only it has seen, and the last write."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from minivllm.bench.hardware.telemetry import peak
from minivllm.bench.records import storage
from minivllm.bench.records.identity import code_hash
from minivllm.bench.records.measurement import Measurement
from minivllm.bench.records.provenance import provenance
from minivllm.bench.records.record import SERVERS_MEMORY, Failure, Validity
from minivllm.bench.records.schema import impossible
from minivllm.config.support import is_elsewhere
from minivllm.platform import files

NO_TRACE = "runtime.profile: there is no trace: {}"  # a note


def write_failure(
    measurement: Measurement,
    status: str,
    kind: str,
    message: str,
    facts: dict[str, Any] | None = None,
    rows: list[dict[str, Any]] | None = None,
    tail: str = "",
) -> None:
    """Write the record of a measurement that gave no result.

    Args:
        measurement: what was to be measured; its directory is made if need be.
        status: as in the record, not "ok".
        kind: name of the exception or signal.
        message: one line for the report.
        facts: provenance; made here where not given.
        rows: telemetry.
        tail: the end of another log, for a measurement that has none of its own.

    Raises:
        OSError: it could not be written.
    """
    files.hide_in_log(measurement.path / storage.LOG)
    record = measurement.record(
        status,
        error=Failure(kind, message, files.log_tail(measurement.path / storage.LOG) or tail),
        provenance=facts or provenance(measurement.config, code_hash()),
        validity=Validity(False, [f"{status}: {message}"]),
    )
    if is_elsewhere(measurement.config):
        record.memory.reason = SERVERS_MEMORY
    elif rows:
        record.memory.host_rss_peak = peak(rows, "rss_peak") or peak(rows, "rss")
        record.memory.device_process = peak(rows, "gpu_process_memory")
    config = None if (measurement.path / storage.CONFIG).exists() else measurement.config
    storage.write_record(measurement.path, record, telemetry=rows, config=config)


def complete(
    measurement: Measurement,
    facts: dict[str, Any],
    rows: list[dict[str, Any]],
    window: Sequence[float] | None,
    no_trace: str | None = None,
) -> tuple[str, str]:
    """Complete the record that a worker handed over with what was seen from outside, and write it.

    Args:
        measurement: what was measured.
        facts: provenance.
        rows: telemetry.
        window: start and end of the measured window, monotonic seconds; None for a simulation, of
            which nothing that was seen from outside is part.
        no_trace: why the worker ended before it had written the trace that was wanted.

    Returns:
        The record's status and, unless it is ok, why.

    Raises:
        OSError: it could not be written; no record.json is there then.
    """
    files.hide_in_log(measurement.path / storage.LOG)
    record = json.loads((measurement.path / storage.HANDOVER).read_text(encoding="utf-8"))
    validity = record["validity"]
    if window is None:
        rows = []
    else:
        _add_telemetry(record, rows, window, measurement, facts)
    if no_trace is not None:
        validity["notes"].append(NO_TRACE.format(no_trace))
        storage.discard_trace(measurement.path)
    if wrong := impossible(record):
        validity["ok"] = False
        validity["reasons"] += wrong
    message = "; ".join(validity["reasons"])
    if not validity["ok"]:
        record["status"] = "invalid"
        record["error"] = asdict(Failure("Invalid", message))
    record["provenance"] = facts | (record.get("provenance") or {})
    files.write_parquet(measurement.path / storage.TELEMETRY, rows)
    storage.finish(measurement.path, record)
    return record["status"], message


def _add_telemetry(
    record: dict[str, Any],
    rows: list[dict[str, Any]],
    window: Sequence[float],
    measurement: Measurement,
    facts: dict[str, Any],
) -> None:
    """Complete the record's memory with peaks of telemetry, and its validity with what that says of
    the window; see `complete`."""
    # late: they take numpy along
    from minivllm.bench.metrics.reconciliation import check_resident
    from minivllm.bench.metrics.telemetry_validity import check_telemetry

    memory, validity = record["memory"], record["validity"]
    _add_seen(memory, rows)
    for place, device in enumerate((record.get("devices") or {}).get("each", ())):
        device["memory_used"] = peak(rows, f"gpu_memory_used_{place}")
        device["memory_process"] = peak(rows, f"gpu_process_memory_{place}")
    interval = measurement.settings.measure.telemetry_interval_s
    start, end = window
    seen = check_telemetry(rows, start, end, interval, facts.get("clocks"))
    validity["ok"] = validity["ok"] and seen.ok
    validity["cpu_taken"] = seen.cpu_taken
    validity["reasons"] += seen.reasons
    validity["notes"] += [*seen.notes, *check_resident(record, facts.get("device") or {})]


def _add_seen(memory: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Add to a memory what telemetry has of the worker, unless that is not the engine's."""
    if memory.get("reason") is None:
        seen = peak(rows, "rss_peak") or peak(rows, "rss")
        memory["host_rss_peak"] = memory["host_rss_peak"] or seen
        memory["device_process"] = memory["device_process"] or peak(rows, "gpu_process_memory")
