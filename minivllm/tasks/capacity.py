"""task=capacity: a bisection for the highest rate at which the objectives of `measure.slo` hold."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from minivllm.analysis.capacity import FEWEST_BLOCKS, UNITS, Capacity, Probe, search
from minivllm.analysis.capacity_runs import (
    arrivals_s,
    criterion_of,
    fits,
    met,
    objectives,
    rate_knob,
)
from minivllm.analysis.format import sig
from minivllm.bench.display import Display
from minivllm.bench.records import identity, storage
from minivllm.bench.records.lock import folder_lock
from minivllm.bench.records.measurement import Measurement
from minivllm.bench.records.reading import read_record
from minivllm.bench.supervisor import Supervisor
from minivllm.config.compose import OPTIONS, build
from minivllm.config.groups import Config
from minivllm.errors import BadInput
from minivllm.experiments.ending import conclude
from minivllm.experiments.preflight import checked_single_run, tracked
from minivllm.experiments.preview import progress
from minivllm.experiments.schedule import recorded_status, standing

DONE = ("ok", "timeout")  # statuses of a record that says something about its rate
DEPTH = 8  # task.start_rate / the lowest rate, where task.min_rate is null


def run(config: dict[str, Any]) -> int:
    """Search for the capacity, measuring each rate as task=bench would, and print it.

    The engine is loaded once for all rates, unless measure.isolation=run. Every measurement is a
    record; a search with the same definition reads the records again, so that the same command
    resumes. Each block of a rate has its own seed, and so its own arrivals and prompts.

    Args:
        config: the resolved configuration; with sweep.dry_run=true the search is only described.

    Returns:
        0 if the objectives hold at some rate, else 1; 0 after a dry run.

    Raises:
        BadInput: the configuration cannot be searched; nothing is written.
        KeyboardInterrupt: Ctrl-C; finished measurements are kept.
    """
    config, fingerprint = checked_single_run(config, further=_check)
    knob = _knob(config)
    searching = _Search(config, knob, fingerprint)
    view = Config.of(config)
    start = view.task.start_rate
    least = view.task.min_rate or start / DEPTH
    if view.sweep.dry_run:
        _preview(searching, start, least)
        return 0
    reported = False
    with folder_lock(searching.root / searching.name, "search", "name"):
        try:
            with Display() as display, Supervisor(tracked(display, config)) as supervisor:
                searching.supervisor = supervisor
                capacity = search(
                    searching.measure, criterion_of(config), start, least, searching.tell
                )
        except _Failed as failure:
            print(
                f"error: the search ended at {failure}; the same command goes on from there",
                file=sys.stderr,
            )
            return 1
        finally:
            reports = Path(view.reports_dir)
            folder = searching.root / searching.name
            reported = conclude(folder, reports / searching.name, config) is not None
    _show(replace(capacity, unit=UNITS[knob]))
    if capacity.holds is None:
        print(searching.explain(capacity))
    return 0 if capacity.holds is not None and reported else 1


def _knob(config: dict[str, Any]) -> str:
    """The knob to search in. Raises BadInput if there is none."""
    knob = rate_knob(config["arrival"])
    if knob is None:
        raise BadInput(
            "task=capacity searches for a rate: use arrival=poisson, gamma, constant, or replay "
            "of a trace"
        )
    return knob


def _check(config: dict[str, Any]) -> None:
    """Check the configuration of a search. Raises BadInput."""
    _knob(config)
    view = Config.of(config)
    if not objectives(vars(view.measure.slo)):
        raise BadInput("task=capacity needs an objective, e.g. measure.slo.ttft_ms=500")
    least, start = view.task.min_rate, view.task.start_rate
    if least is not None and least > start:
        raise BadInput(f"task.min_rate={least:g} must be at most task.start_rate={start:g}")
    criterion = criterion_of(config)
    workload = build(config["workload"]) if view.target("workload") in OPTIONS else None
    if criterion.max_blocks < FEWEST_BLOCKS:
        raise BadInput(
            f"task.max_blocks={criterion.max_blocks}: whether a rate holds is known from the "
            "spread of runs with other seeds, of which it takes at least "
            f"{FEWEST_BLOCKS}; the default has the confidence that it says"
        )
    requests = getattr(workload, "num_requests", None)
    if isinstance(requests, int) and requests * criterion.max_blocks < criterion.least_requests:
        raise BadInput(
            f"task.attainment={criterion.attainment:g} takes at least {criterion.least_requests} "
            f"requests to be known with {100 * criterion.confidence:g} % confidence: raise "
            f"workload.num_requests={requests} or task.max_blocks={criterion.max_blocks}"
        )


class _Failed(Exception):
    """A measurement failed, so its rate is undecided."""


class _Unrecorded(Exception):
    """The next measurement of a dry search has no record."""


class _Search:
    """The measurements of a search.

    Args:
        config: the checked configuration.
        knob: the rate's name in `arrival`.
        fingerprint: of the weights.
    """

    def __init__(self, config: dict[str, Any], knob: str, fingerprint: str) -> None:
        self.config, self.knob, self.fingerprint = config, knob, fingerprint
        view = Config.of(config)
        self.slo: dict[str, float | None] = vars(view.measure.slo)
        self.root = Path(view.runs_dir)
        without = {**config, "arrival": {**config["arrival"], knob: None}}
        cell = identity.cell_id(without, fingerprint)
        self.name: str = view.name or f"capacity-{cell}"
        self.measurements: list[Measurement] = []
        # By rate: the metrics of its first block.
        self.latencies: dict[float, dict[str, Any]] = {}
        self.supervisor: Supervisor

    def measure(self, rate: float, block: int) -> Sequence[bool]:
        """Whether each request met its objectives at a rate, from the record if there is one."""
        measurement = self._measurement(rate, block)
        storage.recover(measurement.path)
        if not self._stands(measurement):
            if not fits(measurement.config):
                raise _Failed(
                    f"{measurement.arm}: its requests take {arrivals_s(measurement.config):.0f} "
                    "s of arrivals and measure.timeout_s is "
                    f"{measurement.settings.measure.timeout_s:g}: raise that, or lower "
                    "workload.num_requests"
                )
            print(f"trying {measurement.arm}{self.duration(rate)}", flush=True)
            outcome = self.supervisor.measure(measurement)
            if outcome.status not in DONE:
                raise _Failed(
                    f"{measurement.arm}: {outcome.status}: {outcome.message} (see "
                    f"{measurement.path})"
                )
        return self._met(rate, measurement)

    def recall(self, rate: float, block: int) -> Sequence[bool]:
        """The result of `measure` from records alone. Raises _Unrecorded where there is none."""
        measurement = self.measurements[-1] = standing(self._measurement(rate, block))
        if not self._stands(measurement):
            raise _Unrecorded(f"{measurement.arm}{self.duration(rate)}")
        return self._met(rate, measurement)

    def _stands(self, measurement: Measurement) -> bool:
        """Whether the record decides its rate; a time-out does not where the time limit has
        grown."""
        if (status := recorded_status(measurement)) not in DONE:
            return False
        record = read_record(measurement.path / storage.RECORD)
        if status == "ok":
            return met(measurement.path, record) is not None
        had, has = (
            c["measure"]["timeout_s"] or math.inf for c in (record["config"], measurement.config)
        )
        return bool(had >= has) and fits(record["config"])

    def _measurement(self, rate: float, block: int) -> Measurement:
        seed = Config.of(self.config).measure.seed + block
        config = {
            **self.config,
            "arrival": {**self.config["arrival"], self.knob: rate},
            "measure": {**self.config["measure"], "seed": seed},
        }
        arm = f"arrival.{self.knob}={rate:g}" + (f" measure.seed={seed}" if block else "")
        position = len(self.measurements)
        (measurement,) = identity.expand(
            config, self.name, arm, self.root, self.fingerprint, position, blocks=1
        )
        self.measurements.append(measurement)
        return measurement

    def _met(self, rate: float, measurement: Measurement) -> Sequence[bool]:
        record = read_record(measurement.path / storage.RECORD)
        self.latencies.setdefault(rate, record.get("metrics") or {})
        seen = met(measurement.path, record, self.slo)
        if seen is None:
            raise _Failed(
                f"{measurement.arm}: which requests meet the objectives is not known: the table of "
                f"requests is missing or torn, or answers of several tokens came in one chunk, "
                f"which have no TPOT (see {measurement.path})"
            )
        return seen

    def duration(self, rate: float) -> str:
        """The seconds until the last arrival in words; empty where unknown or under a second."""
        seconds = arrivals_s({**self.config, "arrival": {self.knob: rate}}) or 0.0
        return f": {seconds:.0f} s of arrivals" if seconds >= 1 else ""

    def explain(self, capacity: Capacity) -> str:
        """A sentence on how far the lowest rate is from its objectives, with advice."""
        rate = capacity.probes[0].rate
        metrics, reasons = self.latencies[rate], []
        for name, limit in objectives(self.slo).items():
            if (p90 := (metrics.get(name) or {}).get("p90")) is not None:
                latency = name.removesuffix("_ms").upper()
                reasons.append(f"{latency} p90 is {sig(p90)} ms (objective {limit:,g} ms)")
        where = (
            f"at {rate:g} {UNITS[self.knob]} {', '.join(reasons) or 'the measurement timed out'}: "
        )
        below = "raise task.max_rates" if capacity.stopped else "lower task.min_rate"
        return f"{where}raise the objectives, or {below} to search below"

    def tell(self, probe: Probe) -> None:
        """Print the share of requests that met their objectives at a rate."""
        criterion = criterion_of(self.config)
        low, high = probe.interval(criterion)
        print(
            f"{probe.rate:g} {UNITS[self.knob]}: {100 * probe.share:.1f} % of "
            f"{probe.num_requests} requests meet their objectives ({100 * low:.1f} to "
            f"{100 * high:.1f} %): {probe.verdict(criterion)}",
            flush=True,
        )


def _preview(searching: _Search, start: float, least: float) -> None:
    """Print how the search proceeds, what is recorded and what comes next; nothing is written."""
    criterion, unit = criterion_of(searching.config), UNITS[searching.knob]
    limits = objectives(searching.slo)
    print(
        f"search {searching.name}: the highest arrival.{searching.knob} at which "
        f"{100 * criterion.attainment:g} % of the requests meet "
        f"{', '.join(f'{name} <= {limit:g}' for name, limit in limits.items())}, with "
        f"{100 * criterion.confidence:g} % confidence\n"
        f"first {start:g} {unit}, doubled while it holds, halved while it does not, down to "
        f"{least:.3g}{searching.duration(least)}\n"
        f"then between the two, about {criterion.bisections} more until they are "
        f"{100 * criterion.tolerance:g} % apart"
    )
    most = criterion.max_rates * criterion.max_blocks
    blocks = " to ".join(map(str, sorted({criterion.min_blocks, criterion.max_blocks})))
    print(f"at most {criterion.max_rates} rates and {most} measurements ({blocks} a rate)")
    try:
        capacity = search(searching.recall, criterion, start, least, searching.tell)
    except _Unrecorded as pending:
        print(progress(searching.measurements[:-1], str(pending)))
    else:
        print(progress(searching.measurements, None))
        _show(replace(capacity, unit=unit))


def _show(capacity: Capacity) -> None:
    from minivllm.report.terminal import bare_table, print_table

    table = bare_table(capacity.unit, "blocks", "requests", "meet all", "interval", "verdict")
    for row in capacity.rows():
        table.add_row(
            f"{row['rate']:g}",
            str(row["blocks"]),
            str(row["requests"]),
            f"{100 * row['share']:.1f} %",
            f"{100 * row['low']:.1f} to {100 * row['high']:.1f} %",
            row["verdict"],
        )
    print_table(table)
    print(capacity.sentence())
