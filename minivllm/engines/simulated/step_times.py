"""How long a step takes: by a linear model, or by the roofline of one rank and the time of what
ranks send each other. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from minivllm.engines.simulated.options import SimulatedOptions
from minivllm.errors import BadInput
from minivllm.models.config import ModelConfig
from minivllm.models.costs import BYTES

ALL_REDUCES_PER_LAYER = 2  # after attention and after the MLP (Shoeybi et al. 2019)
OTHER_ALL_REDUCES = 1  # of the embedding, which is split by the vocabulary
LOGIT_BYTES = 4  # float32
DIVIDED = (
    *("streamed_weight_bytes", "expert_weight_bytes", "flops_per_token"),
    *("head_flops_per_row", "attention_flops_per_token_pair"),
)


def rank_costs(costs: Mapping[str, Any], ranks: int, num_kv_heads: int) -> dict[str, Any]:
    """The costs of one rank, which has its share of every matrix, and at least one key and value
    head.

    Args:
        costs: of the whole model (`architecture_costs`).
    """
    shares = {name: costs[name] / ranks for name in DIVIDED}
    kv = -(-costs["kv_bytes_per_token"] // min(ranks, num_kv_heads))  # whole bytes
    return {**costs, **shares, "kv_bytes_per_token": kv}


@dataclass(frozen=True)
class Communication:
    """The time of a step's collectives.

    An all-reduce by a ring moves 2 (n - 1) / n of the bytes over each link (Patarasuk and Yuan
    2009), and a gather of the logits (n - 1) / n of them; each waits for the latency once.

    Args:
        ranks: n.
        layers: of the model.
        token_bytes: of the activations of a token, which each all-reduce sums.
        row_bytes: of a row of logits.
        bandwidth: of a rank's link, bytes a second.
        latency_s: of one collective.
    """

    ranks: int
    layers: int
    token_bytes: int
    row_bytes: int
    bandwidth: float
    latency_s: float

    def ms(self, tokens: int, rows: int) -> float:
        """Milliseconds of a step of so many tokens and rows of logits."""
        reduces = ALL_REDUCES_PER_LAYER * self.layers + OTHER_ALL_REDUCES
        moved = 2 * reduces * tokens * self.token_bytes + rows * self.row_bytes
        seconds = moved * (self.ranks - 1) / self.ranks / self.bandwidth
        return 1e3 * (seconds + (reduces + 1) * self.latency_s)

    def describe(self) -> str:
        """Half a line for the record."""
        return (
            f"{self.ranks} ranks over links of {self.bandwidth / 1e9:g} GB/s with "
            f"{1e6 * self.latency_s:g} us a collective"
        )


def communication(
    options: SimulatedOptions, model: ModelConfig, ranks: int, dtype: str
) -> Communication | None:
    """What `parallel.tensor` ranks send each other; None: there is one rank.

    Raises:
        BadInput: the link's bandwidth is not given.
    """
    if ranks == 1:
        return None
    if options.link_gb_s is None:
        raise BadInput(
            f"parallel.tensor={ranks}: a simulation needs the links between ranks: set "
            "engine.link_gb_s (and engine.link_us, the latency of a collective)"
        )
    return Communication(
        ranks,
        model.num_layers,
        model.hidden_size * BYTES[dtype],
        model.vocab_size * LOGIT_BYTES,
        options.link_gb_s * 1e9,
        options.link_us / 1e6,
    )


Matrix = NDArray[np.float64]

FEATURES = (
    *("step", "rows", "rows_above_16"),
    *("prefill_step", "prefill_tokens", "prefill_tokens_to_256", "context_tokens", "prefill_pairs"),
    "verifying_step",
)
# prefill tokens up to which one more may cost more: matrix products are not efficient yet
FEW = 256
# Rows past which one more may cost more: where reading the weights no longer is the most of it.
RIDGE = 16
NOTHING = 1e-100  # a column of smaller values is 0: what it is divided by would overflow
STALL = 3.0  # times what was predicted: the machine did something else
ROUNDS = 20


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
