"""Attention over ragged sequences as flash-attention's kernels define it, in a loop: what they are
given is tested by it."""

from __future__ import annotations

import torch
from torch import Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_starts: Tensor,
    key_lens: list[int],
    scale: float,
    window: tuple[int, int],
    soft_cap: float = 0.0,
    table: Tensor | None = None,
) -> Tensor:
    """Masks are aligned at the last key of each sequence.

    Args:
        q: [queries, heads, head_dim], sequences one after another.
        k, v: [keys, kv_heads, head_dim] likewise, or with `table` [pages, page, kv_heads,
            head_dim].
        query_starts: int32 [sequences + 1].
        key_lens: keys of each sequence.
        scale: of scores.
        window: keys to the left and to the right of a query's own that it sees; below zero: all.
        soft_cap: of scores; 0: none.
        table: int32 [sequences, pages]. Keys beyond a sequence's length are not read.

    Returns:
        [queries, heads, head_dim] in q's dtype.
    """
    assert query_starts.dtype == torch.int32 and (table is None or table.dtype == torch.int32)
    groups, outs, at = q.shape[1] // k.shape[-2], [], 0
    for row, (start, end) in enumerate(
        zip(query_starts[:-1].tolist(), query_starts[1:].tolist(), strict=True)
    ):
        count = key_lens[row]
        if table is None:
            keys, values = k[at : at + count], v[at : at + count]
        else:
            pages = table[row, : -(-count // k.shape[1])].long()
            keys, values = k[pages].flatten(0, 1)[:count], v[pages].flatten(0, 1)[:count]
        at += count
        keys, values = (x.float().repeat_interleave(groups, 1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q[start:end].float(), keys) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        own = torch.arange(end - start)[:, None] + count - (end - start)
        distance = torch.arange(count)[None] - own
        left, right = window
        hidden = (distance > right) & (right >= 0) | (distance < -left) & (left >= 0)
        outs.append(
            torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)
        )
    assert table is not None or at == len(k)
    return torch.cat(outs).to(q.dtype)
