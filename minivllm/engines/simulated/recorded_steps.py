"""Recorded steps that a simulation's step times are fitted to."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from minivllm.bench.metrics.roofline import PHASES
from minivllm.bench.metrics.validity import overlap_steps
from minivllm.bench.records.identity import AS_BEFORE, decisive_runtime, requested
from minivllm.bench.records.reading import read_records
from minivllm.bench.records.storage import STEPS
from minivllm.bench.records.tables import read_table
from minivllm.engines.simulated.step_times import (
    FEATURES,
    FEW,
    RIDGE,
    FittedTimes,
    Matrix,
    fit,
)
from minivllm.errors import BadInput

COUNTS = ("num_requests", "num_prefill_tokens", "context_tokens")  # of a recorded step
DRAFTS, DRAFT = "num_drafts", "draft_ms"  # which older records lack
# Groups that decide how long a step takes.
SAME = ("model", "quant", "pruning", "attention", "runtime", "parallel")
# whose steps are those of this scheduler
MEASURED = "minivllm.engines.minivllm.engine.MinivllmEngine"
# Knobs of `parallel` that decide where a request goes, not how long a step takes.
WHICH_REPLICA = (
    *("replicas", "router", "load_weight"),
    *("disaggregated", "prefill_replicas", "handover"),
)
SETTLED = ("weights", "max_model_len")  # of the model; they do not
# Knobs of `speculative` that decide only how many tokens are drafted and which are kept.
LENGTHS_AND_VERDICTS = ("num_speculative_tokens", "adaptive", "verify", "acceptance")
LEAST_STEPS = 50


def fit_records(place: str, config: Mapping[str, Any], of_replicas: bool = True) -> FittedTimes:
    """Fit the steps of all records below a place that ran the same model in the same way.

    Args:
        place: a record folder, a run's folder, or a glob of them (as `load_records`).
        config: the resolved configuration to predict.
        of_replicas: also the steps of several replicas, which hold a part of what the process that
            drives them takes of their cores.

    Raises:
        BadInput: there are none, or too few steps.
    """
    records = _successful(place)
    chosen = (record for record in records if of_replicas or _num_replicas(record) == 1)
    tables = _tables([record for record in chosen if _is_comparable(record, config)])
    steps = sum(len(table["forward_ms"]) for table in tables)
    if steps < LEAST_STEPS:
        raise BadInput(
            f"engine.steps={place}: {len(tables)} of {len(records)} records there have the same "
            f"{', '.join(SAME)} and cache.kv_dtype, with {steps} steps that did not overlap; at "
            f"least {LEAST_STEPS} are needed: measure a few cells of this model with "
            "engine=minivllm runtime.overlap=false first"
        )
    return _fitted([_features(table) for table in tables], "step times")


def measured_driver_us(place: str | None, config: Mapping[str, Any]) -> float:
    """What the process that drives replicas takes of their cores for each token, microseconds: the
    median of the records below a place that ran several of the same model in the same way. Nothing
    where these had fewer threads than there were cores.

    Args:
        place, config: as of `fit_records`.

    Raises:
        BadInput: there are none.
    """
    found = []
    for record in [] if place is None else _successful(place):
        counted = (record.get("liveness") or {}).get("parallel") or {}
        if "driver_us" not in counted or not _is_comparable(record, config):
            continue
        ranks = (record["config"].get("parallel") or {}).get("tensor") or 1
        threads = ranks * sum(map(int, str(counted["threads"]).split("|")))
        cores = ((record.get("provenance") or {}).get("cpu") or {}).get("usable_cores") or 0
        found.append(0.0 if cores > threads else float(counted["driver_us"]))
    if not found:
        raise BadInput(
            f"engine.driver_us=measured: no record of engine.steps={place} has several replicas of "
            "this model: measure a cell with parallel.replicas=2 first, or give microseconds"
        )
    return median(found)


def _num_replicas(record: Mapping[str, Any]) -> int:
    return (record["config"].get("parallel") or {}).get("replicas") or 1


def fit_drafts(place: str, config: Mapping[str, Any]) -> FittedTimes:
    """Fit what it takes to draft a token for each request of a step, by the records below a place
    that also drafted in the same way.

    Args:
        place, config: as of `fit_records`.

    Raises:
        BadInput: there are none, or too few steps with drafts.
    """
    records = drafting_records(place, config)
    parts = [_draft_features(table) for table in _tables(records)]
    steps = sum(len(times) for _, times in parts)
    if steps < LEAST_STEPS:
        raise BadInput(
            f"engine.steps={place}: {len(records)} records of this model there draft in the same "
            f"way, with {steps} steps; at least {LEAST_STEPS} are needed: measure a cell with this "
            "`speculative` and engine=minivllm first"
        )
    return _fitted(parts, "drafting times")


def drafting_records(place: str, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The records below a place that ran the same model in the same way and drafted in the same
    way, however many tokens."""
    drafter = _drafter(config)
    return [
        record
        for record in _successful(place)
        if _is_comparable(record, config) and _drafter(record["config"]) == drafter
    ]


def _drafter(config: Mapping[str, Any]) -> dict[str, Any]:
    node = requested("speculative", config.get("speculative") or {})
    return {knob: value for knob, value in node.items() if knob not in LENGTHS_AND_VERDICTS}


def _successful(place: str) -> list[dict[str, Any]]:
    return [record for record in read_records(place) if record["status"] == "ok"]


def _is_comparable(record: dict[str, Any], config: Mapping[str, Any]) -> bool:
    """Whether a record's steps take as long as those of a configuration."""
    return _identity(record["config"]) == _identity(config) and _measured(record)


def _tables(records: Sequence[dict[str, Any]]) -> list[dict[str, list[Any]]]:
    """The recorded steps of each record that has some."""
    tables = []
    for record in records:
        try:
            digest = (record.get("digests") or {}).get(STEPS)
            read = (*COUNTS, DRAFTS, *PHASES, "gap_ms")
            table = read_table(Path(record["directory"]), STEPS, digest, read, COUNTS).to_pydict()
        except BadInput as damage:
            warnings.warn(f"{record['directory']}/{STEPS} {damage}: left out", stacklevel=3)
            continue
        if table.get("forward_ms"):
            tables.append(table)
    return tables


def _fitted(parts: Sequence[tuple[Matrix, Matrix]], what: str) -> FittedTimes:
    features = np.concatenate([features for features, _ in parts])
    times = np.concatenate([times for _, times in parts])
    coefficients, error = fit(features, times)
    return FittedTimes(tuple(coefficients.tolist()), len(times), len(parts), error, what)


def _identity(config: Mapping[str, Any]) -> dict[str, Any]:
    present = {
        group: node
        for group in SAME
        if (node := config.get(group) or {}).get("_target_") not in AS_BEFORE
    }
    parts = {group: requested(group, present.get(group) or {}) for group in SAME}
    return {
        **parts,
        "model": {k: v for k, v in parts["model"].items() if k not in SETTLED},
        "runtime": decisive_runtime(parts["runtime"]),
        "parallel": {k: v for k, v in parts["parallel"].items() if k not in WHICH_REPLICA},
        # What else the cache does changes no step.
        "kv_dtype": (config.get("cache") or {}).get("kv_dtype", "auto"),
    }


def _measured(record: dict[str, Any]) -> bool:
    """Whether its steps are those of this scheduler, each with a time of its own."""
    own = (record["config"].get("engine") or {}).get("_target_") == MEASURED
    return own and not overlap_steps(record.get("liveness") or {})


def _features(table: dict[str, list[Any]]) -> tuple[Matrix, Matrix]:
    """Features [n, len(FEATURES)] and milliseconds [n] of recorded steps.

    What is recorded does not say which request had which share; equal shares are assumed for the
    pairs.
    """
    times = sum(
        _column(table, phase) for phase in (*PHASES, "gap_ms") if phase in table and phase != DRAFT
    )
    requests, prefill, context = (_column(table, name) for name in COUNTS)
    drafts = _column(table, DRAFTS)
    rows = requests + drafts
    pairs = prefill * (context - prefill / 2) / requests
    above = np.maximum(rows - RIDGE, 0)
    some, few = np.minimum(prefill, 1), np.minimum(prefill, FEW)
    columns = [np.ones_like(requests), rows, above, some, prefill, few, context, pairs]
    features = np.stack([*columns, np.minimum(drafts, 1)], axis=1)
    return features, np.asarray(times, dtype=np.float64)


def _draft_features(table: dict[str, list[Any]]) -> tuple[Matrix, Matrix]:
    """As `_features`, of the steps of the drafting model that a recorded step took together.

    How many these were is not recorded: drafts of equal length are assumed.
    """
    requests, _, context = (_column(table, name) for name in COUNTS)
    drafts, times = _column(table, DRAFTS), _column(table, DRAFT)
    depth = np.ceil(drafts / requests)
    features = np.zeros((len(times), len(FEATURES)))
    features[:, FEATURES.index("step")] = depth
    features[:, FEATURES.index("rows")] = drafts
    features[:, FEATURES.index("context_tokens")] = depth * context
    drafted = (drafts > 0) & (times > 0)
    return features[drafted], times[drafted]


def _column(table: dict[str, list[Any]], name: str) -> Matrix:
    """A column; what is missing is 0."""
    values = table.get(name) or [0.0] * len(table["forward_ms"])
    return np.asarray([value or 0.0 for value in values], dtype=np.float64)
