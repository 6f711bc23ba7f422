"""How long a step takes: fitted to recorded steps, or from the roofline. Free of torch."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from minivllm.bench.metrics.roofline import PHASES
from minivllm.bench.metrics.validity import overlap_steps
from minivllm.bench.records.identity import decisive_runtime
from minivllm.bench.records.reading import read_records
from minivllm.bench.records.storage import STEPS
from minivllm.bench.records.tables import read_table
from minivllm.errors import BadInput

Matrix = NDArray[np.float64]

FEATURES = (
    *("step", "requests", "requests_above_16"),
    *("prefill_step", "prefill_tokens", "prefill_tokens_to_256", "context_tokens", "prefill_pairs"),
)
COUNTS = ("num_requests", "num_prefill_tokens", "context_tokens")  # of a recorded step
# prefill tokens up to which one more may cost more: matrix products are not efficient yet
FEW = 256
# Requests past which one more may cost more: where reading the weights no longer is the most of it.
RIDGE = 16
SAME = ("model", "quant", "attention", "runtime")  # groups that decide how long a step takes
# whose steps are those of this scheduler
MEASURED = "minivllm.bench.targets.minivllm.MinivllmEngine"
SETTLED = ("weights", "max_model_len")  # of the model; they do not
STALL = 3.0  # times what was predicted: the machine did something else
ROUNDS = 20
LEAST_STEPS = 50


class StepTimes(Protocol):
    """Predicts steps."""

    def __call__(
        self, requests: int, tokens: int, prefill: int, context: float, pairs: float
    ) -> float:
        """Milliseconds of a step, and of the gap after it.

        Args:
            requests: in the step.
            tokens: computed in it.
            prefill: those of them that catch up on a prompt.
            context: cached tokens that attention reads, over all requests; by the roofline a mean
                over the layers, as those with a sliding window read fewer (`pairs` too).
            pairs: of a prefill token and a token that it attends to.
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
    """

    coefficients: tuple[float, ...]
    steps: int
    records: int
    error: float

    def __call__(
        self, requests: int, tokens: int, prefill: int, context: float, pairs: float
    ) -> float:
        """See StepTimes."""
        fixed, each, above, started, token, early, read, pair = self.coefficients
        wide = requests - RIDGE if requests > RIDGE else 0
        if prefill:
            fixed += started + token * prefill + early * min(prefill, FEW) + pair * pairs
        return fixed + each * requests + above * wide + read * context

    def describe(self) -> str:
        """See StepTimes."""
        model = " + ".join(
            f"{coefficient:.3g} {name}"
            for name, coefficient in zip(FEATURES, self.coefficients, strict=True)
            if coefficient
        )
        return (
            f"step times fitted to {self.steps} steps of {self.records} records "
            f"(half of them within {100 * self.error:.0f} %): ms = {model}"
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
    """

    costs: dict[str, Any]
    bandwidth: float
    flops: float
    overhead_ms: float

    def __call__(
        self, requests: int, tokens: int, prefill: int, context: float, pairs: float
    ) -> float:
        """See StepTimes. A decoding token's pairs are its context."""
        costs = self.costs
        # if no two tokens share one
        experts = min(costs["experts"], costs["experts_per_token"] * tokens)
        moved = costs["streamed_weight_bytes"] + experts * costs["expert_weight_bytes"]
        moved += costs["kv_bytes_per_token"] * context
        done = costs["flops_per_token"] * tokens + costs["head_flops_per_row"] * requests
        done += costs["attention_flops_per_token_pair"] * (pairs + context)
        return self.overhead_ms + 1e3 * max(moved / self.bandwidth, done / self.flops)

    def describe(self) -> str:
        """See StepTimes."""
        return (
            f"step times from the roofline: {self.bandwidth / 1e9:g} GB/s, {self.flops / 1e12:g} "
            f"TFLOP/s, {self.overhead_ms:g} ms a step besides"
        )


# ---- fitting


def fit_records(place: str, config: Mapping[str, Any]) -> FittedTimes:
    """Fit the steps of all records below a place that ran the same model in the same way.

    Args:
        place: a record folder, a run's folder, or a glob of them (as `load_records`).
        config: the resolved configuration to predict.

    Raises:
        BadInput: there are none, or too few steps.
    """
    identity, columns, used = _identity(config), [], 0
    records = [record for record in read_records(place) if record["status"] == "ok"]
    for record in records:
        if _identity(record["config"]) != identity or not _measured(record):
            continue
        try:
            digest = (record.get("digests") or {}).get(STEPS)
            read = (*COUNTS, *PHASES, "gap_ms")
            table = read_table(Path(record["directory"]), STEPS, digest, read, COUNTS).to_pydict()
        except BadInput as damage:
            warnings.warn(f"{record['directory']}/{STEPS} {damage}: left out", stacklevel=2)
            continue
        if table.get("forward_ms"):
            columns.append(_features(table))
            used += 1
    steps = sum(len(times) for _, times in columns)
    if steps < LEAST_STEPS:
        raise BadInput(
            f"engine.steps={place}: {used} of {len(records)} records there have the same "
            f"{', '.join(SAME)} and cache.kv_dtype, with {steps} steps that did not overlap; at "
            f"least {LEAST_STEPS} are needed: measure a few cells of this model with "
            "engine=minivllm runtime.overlap=false first"
        )
    coefficients, error = fit(
        np.concatenate([features for features, _ in columns]),
        np.concatenate([times for _, times in columns]),
    )
    return FittedTimes(tuple(coefficients.tolist()), steps, used, error)


def _identity(config: Mapping[str, Any]) -> dict[str, Any]:
    parts = {group: dict(config.get(group) or {}) for group in SAME}
    return {
        **parts,
        "model": {k: v for k, v in parts["model"].items() if k not in SETTLED},
        "runtime": decisive_runtime(parts["runtime"]),
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
        np.asarray([value or 0.0 for value in table[phase]])
        for phase in (*PHASES, "gap_ms")
        if phase in table
    )
    requests, prefill, context = (np.asarray(table[name], dtype=np.float64) for name in COUNTS)
    pairs = prefill * (context - prefill / 2) / requests
    above = np.maximum(requests - RIDGE, 0)
    some, few = np.minimum(prefill, 1), np.minimum(prefill, FEW)
    columns = [np.ones_like(requests), requests, above, some, prefill, few, context, pairs]
    features = np.stack(columns, axis=1)
    return features, np.asarray(times, dtype=np.float64)


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

    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0.0] = 1.0  # of columns, whose units may lie far apart
    result: Matrix = nnls(a / scale, b)[0] / scale
    return result
