"""The tensors of one step, as every backend and model takes them."""

from __future__ import annotations

from typing import Any, NamedTuple

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
