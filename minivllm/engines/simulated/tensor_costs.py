"""What a rank of a tensor-parallel model does in a step, and what ranks send each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
