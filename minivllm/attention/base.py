"""What a model asks of attention, and what an attention backend must offer."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from minivllm.attention.batch import StepBatch


class AttentionBackend(Protocol):
    """Attention over the paged cache.

    The constructor checks every constraint and raises BadInput with what to use instead. What only
    some backends offer is in capabilities.py."""

    name: str

    def prepare(self, batch: StepBatch) -> Any:
        """Compute once a step what all layers share. The result is `batch.attention`."""

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: StepBatch) -> Tensor:
        """Write k and v into the cache at `batch.slot_mapping`, then attend. If
        `batch.attention_scores` is given, add the attention that each block of each request got; a
        backend without these scores calls `require_unscored` on construction.

        Args:
            layer: index of the layer (selects its cache and its AttentionSpec).
            q: [tokens, num_heads, head_dim]; k, v: [tokens, num_kv_heads, head_dim], rotated.

        Returns:
            [tokens, num_heads, head_dim] in q's dtype.
        """
