"""The searches for capacity that records are of, and what each record says of its rate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minivllm.analysis.capacity import TASK, UNITS, Capacity, Criterion, Probe
from minivllm.bench.metrics.objectives import all_met, is_met
from minivllm.bench.metrics.request_trace import UNMEASURED
from minivllm.bench.records.identity import cell_id, digest
from minivllm.bench.records.reading import record_in
from minivllm.bench.records.schema import checker
from minivllm.bench.records.storage import REQUESTS
from minivllm.bench.records.tables import read_table
from minivllm.config.groups import OPTIONS
from minivllm.errors import BadInput
from minivllm.platform.times import moment_of

OBJECTIVES = ("ttft_ms", "tpot_ms", "e2e_ms")
TIMED_OUT = 1000  # requests that a measurement which timed out counts as


def rate_knob(arrival: Mapping[str, Any]) -> str | None:
    """The knob of an arrival process that is searched: its rate, or how much faster a trace is
    replayed."""
    return next((name for name in UNITS if name in arrival), None)


def objectives(slo: Mapping[str, Any]) -> dict[str, float]:
    """Those that are set, in milliseconds."""
    return {name: float(slo[name]) for name in OBJECTIVES if slo.get(name) is not None}


def arrivals_s(config: Mapping[str, Any]) -> float | None:
    """Seconds until the last request of a rate has come; None where the configuration does not
    say."""
    requests, rate = (
        (config.get("workload") or {}).get("num_requests"),
        config["arrival"].get("rate"),
    )
    return requests / rate if requests and rate else None


def fits(config: Mapping[str, Any]) -> bool:
    """Whether all requests come before a measurement times out, so that its timing out says
    something of the engine."""
    return (arrivals_s(config) or 0.0) < (config["measure"].get("timeout_s") or math.inf)


def met(
    directory: Path, record: Mapping[str, Any], slo: Mapping[str, Any] | None = None
) -> list[bool] | None:
    """Whether each request of a recorded measurement met every objective, in the order of the
    workload.

    One that did not complete met none; one of a single token meets any TPOT. A measurement that
    timed out counts as one whose queue grew without end: no request met them. Of other failures,
    where there was no time for all requests to come, where their table is missing or torn, and
    where a TPOT is not known (see `is_met`), nothing is known.

    Args:
        directory: of the record.
        record: as record.json has it.
        slo: the objectives; None: those that the record was made with.
    """
    if record["status"] == "timeout":
        return [False] * TIMED_OUT if fits(record["config"]) else None
    if record["status"] != "ok":
        return None
    limits = objectives(record["config"]["measure"]["slo"] if slo is None else slo)
    digest = (record.get("digests") or {}).get(REQUESTS)
    try:
        columns = ["status", "output_tokens", *limits]
        rows = read_table(directory, REQUESTS, digest, columns).to_pylist()
    except BadInput:
        return None
    if any(name not in row for row in rows[:1] for name in columns):
        return None
    seen = [
        all_met(is_met(name, row[name], row["output_tokens"], limits[name]) for name in limits)
        if row["status"] == "ok"
        else False
        for row in rows
        if row["status"] != UNMEASURED
    ]
    return None if None in seen else [bool(one) for one in seen]


@dataclass(frozen=True)
class CapacityRun:
    """What the records of one search say: of one cell, by one version of the code, on one
    device."""

    sweep: str
    cell: str  # the readable name of what was measured
    capacity: Capacity
    limits: dict[str, float]  # the objectives, in milliseconds
    left_out: int = 0  # records of the same cell by other code or on another device


def from_records(directories: Iterable[Path]) -> list[CapacityRun]:
    """The searches that records are of, and what each has found.

    Of one cell in one sweep the newest search counts, with its objectives and its criterion;
    records by other code or on another device, and those whose search cannot be known from their
    configuration, are not of it.

    Args:
        directories: of records, those of other tasks and those that did not end well among them.
    """
    cells: dict[tuple[str, str], list[tuple[Path, dict[str, Any]]]] = {}
    for directory in sorted(directories):
        if (record := record_in(directory)) is None or not record.get("config"):
            continue
        config = record["config"]
        knob = rate_knob(config.get("arrival") or {})
        if (
            (config.get("task") or {}).get("_target_") == TASK
            and knob is not None
            and _whole(config, knob)
        ):
            cells.setdefault((record.get("sweep", ""), _cell(config, knob)), []).append(
                (directory, record)
            )
    return [search for members in cells.values() if (search := _newest(members)) is not None]


def _whole(config: Mapping[str, Any], knob: str) -> bool:
    """Whether a recorded configuration says what was searched for."""
    task = {name: value for name, value in config["task"].items() if name != "_target_"}
    try:
        OPTIONS[TASK](**task)
    except (BadInput, TypeError):
        return False
    rate = config["arrival"][knob]
    if checker(OPTIONS[TASK])(task) is not None:
        return False
    return (
        bool((config.get("measure") or {}).get("slo")) and checker(float)(rate) is None and rate > 0
    )


def _cell(config: Mapping[str, Any], knob: str) -> str:
    """Identity of what a rate is searched for: all but the rate, and the seed, in which blocks
    differ."""
    arrival, measure = dict(config["arrival"]), dict(config["measure"])
    arrival.pop(knob)
    measure.pop("seed", None)
    return cell_id({**config, "arrival": arrival, "measure": measure}, digest(config.get("model")))


def _newest(members: Sequence[tuple[Path, dict[str, Any]]]) -> CapacityRun | None:
    """What the newest of the records is part of; None where nothing is known of any rate."""

    def when(member: tuple[Path, dict[str, Any]]) -> float:
        return moment_of((member[1].get("provenance") or {}).get("started_at"))

    directory, newest = max(members, key=when)
    config = newest["config"]
    knob = rate_knob(config["arrival"])
    assert knob is not None
    blocks: dict[float, dict[Any, Sequence[bool]]] = {}  # of a rate, by block
    kept = [(place, record) for place, record in members if _is_comparable(record, newest)]
    # of a block that was measured again the newest counts
    for place, record in sorted(kept, key=when):
        if (seen := met(place, record, config["measure"]["slo"])) is not None:
            blocks.setdefault(float(record["config"]["arrival"][knob]), {})[_block(record)] = seen
    if not blocks:
        return None
    probes = tuple(Probe(rate, [*blocks[rate].values()]) for rate in sorted(blocks))
    return CapacityRun(
        newest.get("sweep", ""),
        directory.name.removesuffix(f"-{newest['run_id']}"),
        Capacity(probes, criterion_of(config), UNITS[knob]),
        objectives(config["measure"]["slo"]),
        len(members) - len(kept),
    )


def _block(record: Mapping[str, Any]) -> tuple[Any, Any]:
    """What tells the blocks of a rate apart: their seed, and the host."""
    return record["config"]["measure"].get("seed"), (record.get("provenance") or {}).get("host")


def _is_comparable(record: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether both are by one version of the code on one device; a record that cannot say is like
    any."""

    def about(one: Mapping[str, Any]) -> tuple[Any, Any]:
        provenance = one.get("provenance") or {}
        return provenance.get("code_hash"), (provenance.get("device") or {}).get("name")

    return all(a == b or None in (a, b) for a, b in zip(about(record), about(other), strict=True))


def criterion_of(config: Mapping[str, Any]) -> Criterion:
    """The criterion that a configuration asks for."""
    task = config["task"]
    least = config["measure"].get("repeats") or 1
    return Criterion(
        attainment=task["attainment"],
        confidence=task["confidence"],
        min_blocks=least,
        max_blocks=max(least, task["max_blocks"]),
        tolerance=task["tolerance"],
        max_rates=task["max_rates"],
    )
