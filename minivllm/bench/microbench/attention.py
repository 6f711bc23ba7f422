"""Attention over a paged cache: sequences that decode, and prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from minivllm.attention.base import AttentionBackend, StepBatch
from minivllm.attention.eager import EagerBackend
from minivllm.attention.kernels.cpu import CPUBackend
from minivllm.attention.sdpa import SDPABackend
from minivllm.attention.triton import TritonBackend
from minivllm.bench.microbench.case import DTYPE, ITEM, MOST_COPIES, Case, Setting, Side
from minivllm.cache.kv import KVCache
from minivllm.cache.spec import AttentionSpec, CacheLayout
from minivllm.kernels.device import BuildContext

BLOCK = 16  # tokens, the default
_PIECE = 1024  # tokens written at a time


def cases(setting: Setting) -> Iterator[Case]:
    """Decoding, then the verification of drafts, for each context and number of sequences; then one
    prompt for each context."""
    queries = {"attention decode": 1}
    if setting.drafts:
        queries["attention verify"] = setting.drafts + 1
    for kernel, count in queries.items():
        for context in setting.contexts:
            for rows in setting.rows:
                yield _case(setting, kernel, rows, context, count)
    for context in setting.contexts:
        yield _case(setting, "attention prefill", 1, context, context)


def _case(setting: Setting, kernel: str, sequences: int, context: int, queries: int) -> Case:
    """Sequences that are `context` tokens long and compute their last `queries`."""
    c = setting.model
    spec = AttentionSpec(
        c.num_heads, c.num_kv_heads, c.head_dim, c.attention_scale, None, c.attention_soft_cap
    )
    tokens, token_bytes = sequences * queries, 2 * c.num_kv_heads * c.head_dim * ITEM
    cached = sequences * context * token_bytes
    copies = min(MOST_COPIES, setting.copies(cached))
    blocks = -(-context // BLOCK)
    # Each layer of the cache is a copy.
    specs = [spec] * copies
    kv = KVCache(specs, CacheLayout(BLOCK, sequences * blocks + 1), DTYPE, setting.device)
    for part in (part for parts in kv.parts for part in parts):
        part.copy_(setting.random(*part.shape))
    batch = _batch(setting, sequences, context, queries, blocks)
    q, k, v = setting.random(copies, tokens, c.num_heads + 2 * c.num_kv_heads, c.head_dim).split(
        (c.num_heads, c.num_kv_heads, c.num_kv_heads), 2
    )
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()  # as the C++ kernel wants them
    ours: AttentionBackend = (
        TritonBackend(specs, kv) if setting.triton else _on_own_cache(setting, specs, kv)
    )
    theirs: AttentionBackend = (SDPABackend if spec.soft_cap is None else EagerBackend)(specs, kv)
    pairs = sequences * (queries * context - queries * (queries - 1) / 2)
    return Case(
        kernel,
        f"{context} tokens each",
        sequences,
        Side(ours.name, _caller(ours, batch, q, k, v)),
        Side(theirs.name, _caller(theirs, batch, q, k, v)),
        bytes=cached + tokens * (2 * c.num_heads * c.head_dim * ITEM + token_bytes),
        operations=4.0 * c.num_heads * c.head_dim * pairs,
        copies=copies,
    )


def _on_own_cache(setting: Setting, specs: list[AttentionSpec], kv: KVCache) -> CPUBackend:
    """The C++ kernel with the keys and values of `kv`, in the order within a block that it likes
    best."""
    context = BuildContext(torch.device("cpu"), setting.kernels)
    own = KVCache(specs, kv.layout, DTYPE, context.device)
    backend = CPUBackend(specs, own, context)
    for slots in torch.arange(kv.layout.num_blocks * BLOCK).split(_PIECE):
        # Each token is a sequence that consists of it, whatever its slot; what they attend to is of
        # no interest.
        nowhere = torch.zeros(len(slots), 1, dtype=torch.int32)
        batch = _batch(setting, len(slots), 1, 1, 1)._replace(
            slot_mapping=slots, block_table=nowhere
        )
        for layer, spec in enumerate(specs):
            k, v = (part.flatten(0, 1)[slots] for part in kv.parts[layer])
            q = torch.zeros(len(slots), spec.num_heads, spec.head_dim, dtype=DTYPE)
            backend.forward(layer, q, k, v, batch)
    return backend


def _caller(
    backend: AttentionBackend, batch: StepBatch, q: Tensor, k: Tensor, v: Tensor
) -> Callable[[int], Tensor]:
    prepared = batch._replace(attention=backend.prepare(batch))
    copies = len(q)

    def call(i: int) -> Tensor:
        i %= copies
        return backend.forward(i, q[i], k[i], v[i], prepared)

    return call


def _batch(setting: Setting, sequences: int, context: int, queries: int, blocks: int) -> StepBatch:
    """A step in which every sequence has its blocks somewhere in the cache."""

    def tensor(values: Tensor, dtype: torch.dtype) -> Tensor:
        return values.to(setting.device, dtype)

    table = (torch.randperm(sequences * blocks) + 1).view(sequences, blocks)
    positions = torch.arange(context - queries, context).repeat(sequences)
    owners = torch.arange(sequences).repeat_interleave(queries)
    slots = table[owners, positions // BLOCK] * BLOCK + positions % BLOCK
    return StepBatch(
        token_ids=tensor(torch.zeros(len(positions)), torch.int64),
        positions=tensor(positions, torch.int64),
        slot_mapping=tensor(slots, torch.int64),
        query_start_loc=tensor(torch.arange(sequences + 1) * queries, torch.int32),
        seq_lens=tensor(torch.full((sequences,), context), torch.int32),
        block_table=tensor(table, torch.int32).contiguous(),
        logit_rows=tensor(torch.arange(sequences), torch.int64),
        query_lens_host=(queries,) * sequences,
        seq_lens_host=(context,) * sequences,
        rotated_lens_host=(context,) * sequences,
    )
