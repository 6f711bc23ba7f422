"""Log-probabilities that requests ask for, of sampled tokens and of their prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from minivllm.engine.step import StepPlan
from minivllm.errors import NonFiniteLogits
from minivllm.kernels.ranking import largest


def top_logprobs(
    logits: Tensor, chosen: Sequence[int], counts: Sequence[int | None]
) -> list[dict[int, float] | None]:
    """Log-probabilities of the `counts[i]` most likely tokens and of `chosen[i]`, for rows that ask
    (not None).

    They are the model's own, before temperature, penalties and filters.
    """
    result: list[dict[int, float] | None] = [None] * len(chosen)
    wanted = {row: count for row, count in enumerate(counts) if count is not None}
    if not wanted:
        return result
    rows = list(wanted)
    # All rows at once: three copies to the host a step, not three a row.
    scores = logits[rows].float()
    logprobs = torch.log_softmax(scores, dim=-1)
    every = logprobs.shape[1]
    wanted = {row: every if count < 0 else min(count, every) for row, count in wanted.items()}
    top = largest(scores, max(1, *wanted.values()))[1]
    values, ids = logprobs.gather(1, top).tolist(), top.tolist()
    own = logprobs.gather(
        1, torch.tensor([[chosen[row]] for row in rows], device=logits.device)
    ).tolist()
    for i, (row, count) in enumerate(wanted.items()):
        result[row] = {chosen[row]: own[i][0]} | dict(
            zip(ids[i][:count], values[i][:count], strict=True)
        )
    return result


LOGPROB_ROWS = 256  # prompt positions whose log-probabilities are taken at once


def take_prompt_logprobs(plan: StepPlan, logits: Tensor) -> None:
    """Keep the prompt log-probabilities that requests want.

    Args:
        plan: the step.
        logits: [L, vocab], of every token of such requests, and of the last known one and of
            the drafts of others.
    """
    row = 0
    for part in plan.scheduled:
        request = part.request
        count = request.params.prompt_logprobs
        if count is None:
            # Of a request with drafts, those that its mask rejects may be gone by now.
            row += part.num_drafts + (part.num_drafts > 0 or part.samples)
            continue
        known = request.prompt_logprobs
        assert known is not None
        # Some may be there from before a preemption. A slice at a time bounds the float32 copy.
        stop = min(part.end, request.num_prompt_tokens - 1)
        for begin in range(max(part.start, len(known)), stop, LOGPROB_ROWS):
            end = min(begin + LOGPROB_ROWS, stop)
            block = logits[row + begin - part.start : row + end - part.start]
            entries = top_logprobs(
                block, request.token_ids[begin + 1 : end + 1], [count] * (end - begin)
            )
            known.extend(entry for entry in entries if entry is not None)
            for position, entry in enumerate(known[begin:], begin + 1):
                if request.error is None and math.isnan(next(iter(entry.values()))):
                    request.error = NonFiniteLogits.of(request.request_id, position)
        row += part.num_tokens
