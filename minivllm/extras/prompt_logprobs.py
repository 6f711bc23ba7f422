"""Log-probabilities of a prompt's own tokens."""

from __future__ import annotations

import math

from torch import Tensor

from minivllm.engine.step import StepPlan
from minivllm.errors import NonFiniteLogits
from minivllm.extras.logprobs import top_logprobs

LOGPROB_ROWS = 256  # prompt positions whose log-probabilities are taken at once


def take_prompt_logprobs(plan: StepPlan, logits: Tensor) -> None:
    """Keep the prompt log-probabilities that requests asked for.

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
