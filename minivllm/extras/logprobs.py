"""Log-probabilities that requests ask for, of sampled tokens and of their prompts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minivllm.kernels.ranking import largest


def top_logprobs(
    logits: Tensor, chosen: Sequence[int], counts: Sequence[int | None]
) -> list[dict[int, float] | None]:
    """Log-probabilities of the `counts[i]` most likely tokens and of `chosen[i]`, for rows that ask
    (not None).

    They are the model's own, before temperature, penalties and filters.
    """
    result: list[dict[int, float] | None] = [None] * len(chosen)
    asked = {row: count for row, count in enumerate(counts) if count is not None}
    if not asked:
        return result
    rows = list(asked)
    # All rows at once: three copies to the host a step, not three a row.
    scores = logits[rows].float()
    logprobs = torch.log_softmax(scores, dim=-1)
    every = logprobs.shape[1]
    asked = {row: every if count < 0 else min(count, every) for row, count in asked.items()}
    top = largest(scores, max(1, *asked.values()))[1]
    values, ids = logprobs.gather(1, top).tolist(), top.tolist()
    own = logprobs.gather(
        1, torch.tensor([[chosen[row]] for row in rows], device=logits.device)
    ).tolist()
    for i, (row, count) in enumerate(asked.items()):
        result[row] = {chosen[row]: own[i][0]} | dict(
            zip(ids[i][:count], values[i][:count], strict=True)
        )
    return result
