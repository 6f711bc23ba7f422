"""The tensors of one step, as every backend and model takes them; what an attention backend must
offer, and what only some offer, each a protocol of its own: a backend has the attribute, and needs
to derive from nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor


class StepBatch(NamedTuple):
    """One step's tensors, ragged (no padding), passed through model, layer and attention.

    Requests follow each other along the token axis. T tokens, R requests, B blocks (at least those
    of the longest request), L rows with logits."""

    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T], position of each token in its sequence
    slot_mapping: Tensor  # int64 [T], where each token's key and value are written in the cache
    query_start_loc: Tensor  # int32 [R + 1], first token of each request; the last entry is T
    # int32 [R], tokens that each request holds: cached tokens (without evicted ones) plus new ones
    seq_lens: Tensor
    block_table: Tensor  # int32 [R, B], cache blocks of each request, padded with block 0
    logit_rows: Tensor  # int64 [L], rows of the hidden states to compute logits for
    query_lens_host: tuple[int, ...]  # query lengths on the host, so that no backend waits
    seq_lens_host: tuple[int, ...]
    rotated_lens_host: tuple[int, ...]  # the length of each request that some rotary scalings need
    # float32 [R, B], to which backends add the attention that each block gets; None: not needed
    attention_scores: Tensor | None = None
    # With `attention_scores`: of each request, how many of its last queries count.
    observed_host: tuple[int, ...] = ()
    inputs: Any = None  # embeddings in place of tokens', see models/vision/tower.py; None: none
    attention: Any = None  # result of the attention backend's prepare()


class AttentionBackend(Protocol):
    """Attention over the paged cache.

    The constructor checks every constraint and raises BadInput with what to use instead. What only
    some backends offer is in the protocols below."""

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


@runtime_checkable
class GraphBackend(AttentionBackend, Protocol):
    """A backend that says whether CUDA graphs can replay its steps."""

    # True if launches depend on nothing but the shapes of the batch's tensors and what `prepare`
    # computes from upper bounds of the lengths.
    supports_graphs: bool


@runtime_checkable
class LibraryBackend(AttentionBackend, Protocol):
    """A backend whose attention another library computes."""

    library: str  # its name and version, for records


@runtime_checkable
class CountingBackend(AttentionBackend, Protocol):
    """A backend that counts its work."""

    counters: Mapping[str, int]  # since it was made, for `liveness.attention`
