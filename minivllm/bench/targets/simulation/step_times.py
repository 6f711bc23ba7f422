"""How long a step takes: fitted to recorded steps, or from the roofline. Free of torch."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from minivllm.bench.metrics.roofline import PHASES
from minivllm.bench.metrics.validity import overlap_steps
from minivllm.bench.records.identity import AS_BEFORE, asked, decisive_runtime
from minivllm.bench.records.reading import read_records
from minivllm.bench.records.storage import STEPS
from minivllm.bench.records.tables import read_table
from minivllm.bench.targets.simulation.tensor_costs import Communication
from minivllm.errors import BadInput

Matrix = NDArray[np.float64]

FEATURES = (
    *("step", "rows", "rows_above_16"),
    *("prefill_step", "prefill_tokens", "prefill_tokens_to_256", "context_tokens", "prefill_pairs"),
    "verifying_step",
)
COUNTS = ("num_requests", "num_prefill_tokens", "context_tokens")  # of a recorded step
DRAFTS, DRAFT = "num_drafts", "draft_ms"  # which older records lack
# prefill tokens up to which one more may cost more: matrix products are not efficient yet
FEW = 256
# Rows past which one more may cost more: where reading the weights no longer is the most of it.
RIDGE = 16
SAME = (
    "model",
    "quant",
    "pruning",
    "attention",
    "runtime",
    "parallel",
)  # groups that decide how long a step takes
# whose steps are those of this scheduler
MEASURED = "minivllm.bench.targets.minivllm.MinivllmEngine"
# Knobs of `parallel` that decide where a request goes, not how long a step takes.
WHICH_REPLICA = (
    *("replicas", "router", "load_weight"),
    *("disaggregated", "prefill_replicas", "handover"),
)
SETTLED = ("weights", "max_model_len")  # of the model; they do not
NOTHING = 1e-100  # a column of smaller values is 0: what it is divided by would overflow
# Knobs of `speculative` that decide only how many tokens are drafted and which are kept.
LENGTHS_AND_VERDICTS = ("num_speculative_tokens", "adaptive", "verify", "acceptance")
STALL = 3.0  # times what was predicted: the machine did something else
ROUNDS = 20
LEAST_STEPS = 50


class StepTimes(Protocol):
    """Predicts steps."""

    def __call__(
        self, requests: int, tokens: int, prefill: int, context: float, pairs: float, drafts: int
    ) -> float:
        """Milliseconds of a step, and of the gap after it, without drafting.

        Args:
            requests: in the step.
            tokens: computed in it.
            prefill: those of them that catch up on a prompt.
            context: cached tokens that attention reads, over all requests; by the roofline a mean
                over the layers, as those with a sliding window read fewer (`pairs` too).
            pairs: of a prefill token and a token that it attends to.
            drafts: tokens that it verifies. Each has a row of logits, as each request has one.
        """

    def describe(self) -> str:
        """One line for the record."""


@dataclass(frozen=True)
class FittedTimes:
    """A linear model of a step.

    Args:
        coefficients: milliseconds a unit of each of FEATURES, none negative.
        steps: it was fitted to.
        records: that they came from.
        error: median of |predicted - recorded| / predicted over them.
        what: was fitted.
        driver_ms: milliseconds a row for the driving process, see `driven`.
    """

    coefficients: tuple[float, ...]
    steps: int
    records: int
    error: float
    what: str = "step times"
    driver_ms: float = 0.0

    def __call__(
        self, requests: int, tokens: int, prefill: int, context: float, pairs: float, drafts: int
    ) -> float:
        fixed, each, above, started, token, early, read, pair, verifying = self.coefficients
        rows = requests + drafts
        wide = rows - RIDGE if rows > RIDGE else 0
        if prefill:
            fixed += started + token * prefill + early * min(prefill, FEW) + pair * pairs
        if drafts:
            fixed += verifying
        return fixed + (each + self.driver_ms) * rows + above * wide + read * context

    def describe(self) -> str:
        model = " + ".join(
            f"{coefficient:.3g} {name}"
            for name, coefficient in zip(FEATURES, self.coefficients, strict=True)
            if coefficient
        )
        return (
            f"{self.what} fitted to {self.steps} steps of {self.records} records "
            f"(half of them within {100 * self.error:.0f} %): ms = {model}{driven(self.driver_ms)}"
        )


@dataclass(frozen=True)
class RooflineTimes:
    """The time that the hardware's limits allow: bytes at the bandwidth or operations at the matrix
    rate.

    Args:
        costs: of the model (`architecture_costs`).
        bandwidth: bytes a second.
        flops: operations a second.
        overhead_ms: of every step.
        communication: between ranks, whose own costs `costs` are; None: there is one.
        driver_ms: milliseconds a row for the driving process, see `driven`.
    """

    costs: dict[str, Any]
    bandwidth: float
    flops: float
    overhead_ms: float
    communication: Communication | None = None
    driver_ms: float = 0.0

    def __call__(
        self, requests: int, tokens: int, prefill: int, context: float, pairs: float, drafts: int
    ) -> float:
        """See StepTimes. A decoding token's pairs are its context; equal contexts are assumed for
        drafts."""
        costs = self.costs
        # if no two tokens share one
        experts = min(costs["experts"], costs["experts_per_token"] * tokens)
        moved = costs["streamed_weight_bytes"] + experts * costs["expert_weight_bytes"]
        moved += costs["kv_bytes_per_token"] * context
        done = costs["flops_per_token"] * tokens + costs["head_flops_per_row"] * (requests + drafts)
        attended = pairs + context * (1 + drafts / requests)
        done += costs["attention_flops_per_token_pair"] * attended
        own = self.overhead_ms + 1e3 * max(moved / self.bandwidth, done / self.flops)
        own += self.driver_ms * (requests + drafts)
        if self.communication is None:
            return own
        return own + self.communication.ms(tokens, requests + drafts)

    def describe(self) -> str:
        ranks = "" if self.communication is None else f"; {self.communication.describe()}"
        return (
            f"step times from the roofline: {self.bandwidth / 1e9:g} GB/s, {self.flops / 1e12:g} "
            f"TFLOP/s, {self.overhead_ms:g} ms a step besides{ranks}{driven(self.driver_ms)}"
        )


def driven(driver_ms: float) -> str:
    """The end of a line for the record: what the process that sends requests and reads tokens takes
    of a replica's core for each row of logits; "" where it has a core of its own."""
    return f"; {1e3 * driver_ms:g} us a token for the driving process" if driver_ms else ""


# ---- fitting


def fit_records(place: str, config: Mapping[str, Any]) -> FittedTimes:
    """Fit the steps of all records below a place that ran the same model in the same way.

    Args:
        place: a record folder, a run's folder, or a glob of them (as `load_records`).
        config: the resolved configuration to predict.

    Raises:
        BadInput: there are none, or too few steps.
    """
    records = _successful(place)
    tables = _tables([record for record in records if _alike(record, config)])
    steps = sum(len(table["forward_ms"]) for table in tables)
    if steps < LEAST_STEPS:
        raise BadInput(
            f"engine.steps={place}: {len(tables)} of {len(records)} records there have the same "
            f"{', '.join(SAME)} and cache.kv_dtype, with {steps} steps that did not overlap; at "
            f"least {LEAST_STEPS} are needed: measure a few cells of this model with "
            "engine=minivllm runtime.overlap=false first"
        )
    return _fitted([_features(table) for table in tables], "step times")


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
        if _alike(record, config) and _drafter(record["config"]) == drafter
    ]


def _drafter(config: Mapping[str, Any]) -> dict[str, Any]:
    node = asked("speculative", config.get("speculative") or {})
    return {knob: value for knob, value in node.items() if knob not in LENGTHS_AND_VERDICTS}


def _successful(place: str) -> list[dict[str, Any]]:
    return [record for record in read_records(place) if record["status"] == "ok"]


def _alike(record: dict[str, Any], config: Mapping[str, Any]) -> bool:
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
    parts = {group: asked(group, present.get(group) or {}) for group in SAME}
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


def fit(features: Matrix, times: Matrix) -> tuple[Matrix, float]:
    """Non-negative coefficients that predict most steps, whatever some others do.

    The error of a step counts relative to the square root of its time, so that neither the many
    short steps nor the few long ones decide alone. Huber's weights (1964) keep outliers from
    deciding what is one; then the level is set so that the total time is right but for stalls,
    since times are skewed.

    Args:
        features: [n, k].
        times: [n], above 0.

    Returns:
        Coefficients [k], and the median relative error of all steps.
    """
    coefficients = nonnegative_least_squares(features, times)
    for _ in range(ROUNDS):
        scale = np.sqrt(np.maximum(features @ coefficients, 1e-6))
        error = np.abs(times - scale**2) / scale
        spread = max(1.4826 * float(np.median(error)), 1e-9)
        weights = np.sqrt(np.minimum(1.0, 1.345 * spread / np.maximum(error, 1e-12))) / scale
        coefficients = nonnegative_least_squares(features * weights[:, None], times * weights)
    predicted = np.maximum(features @ coefficients, 1e-6)
    usual = times <= STALL * predicted
    coefficients = coefficients * (
        float(times[usual].sum()) / max(float(predicted[usual].sum()), 1e-6)
    )
    error = np.abs(times - predicted) / predicted
    return coefficients, float(np.median(error))


def nonnegative_least_squares(a: Matrix, b: Matrix) -> Matrix:
    """The x >= 0 with the least |a x - b|, by scipy's active set (Lawson and Hanson, 1974).

    Args:
        a: [n, k].
        b: [n].
    """
    from scipy.optimize import nnls

    scale = np.linalg.norm(a, axis=0)  # of columns, whose units may lie far apart
    nothing = scale < NOTHING
    scale[nothing] = 1.0
    result: Matrix = nnls(np.where(nothing, 0.0, a / scale), b)[0] / scale
    return result
