"""Logit processors: biases, penalties, tokens that may not end an output yet, and masks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minivllm.engine.options import SamplingParams
from minivllm.engine.request import Request
from minivllm.errors import BadInput
from minivllm.platform.given import FLOAT32


class RowAdjustment(NamedTuple):
    """What changes one row of logits."""

    row: int
    params: SamplingParams  # its bias and its penalties
    seen: list[int]  # tokens of prompt and output, which a repetition penalty goes by
    output: list[int]  # tokens of the output, which the other penalties go by
    forbidden: list[int]  # tokens that end the output, before `min_tokens`
    allowed: Tensor | None  # bool [vocab], on the host; None: no mask

    def apply(self, logits: Tensor) -> None:
        """Change float32 logits [vocab] in place. What becomes too large for float32 is the largest
        number that it holds."""
        params, device = self.params, logits.device
        if params.logit_bias:
            biased = torch.tensor(list(params.logit_bias), device=device)
            values = logits[biased] + torch.tensor([*params.logit_bias.values()], device=device)
            logits[biased] = values.clamp_(max=FLOAT32)
        if self.seen:
            seen, factor = torch.tensor(self.seen, device=device), params.repetition_penalty
            values = logits[seen]
            values = torch.where(values > 0, values / factor, values * factor)
            logits[seen] = values.clamp_(max=FLOAT32)
        if self.output:
            output = torch.tensor(self.output, device=device)
            counts = torch.bincount(output, minlength=len(logits))
            logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        if self.forbidden:
            logits[self.forbidden] = -math.inf
        if self.allowed is not None:
            logits.masked_fill_(~self.allowed.to(device), -math.inf)


class Adjustments(NamedTuple):
    """What changes the logits of a step; see LogitsAdjustment."""

    rows: tuple[RowAdjustment, ...]

    @property
    def num_rows(self) -> int:
        """Rows with a bias, a penalty or a mask."""
        return sum(row.params.adjusts_logits for row in self.rows)

    def apply(self, logits: Tensor) -> None:
        """See LogitsAdjustment."""
        for one in self.rows:
            one.apply(logits[one.row])


def adjust_logits(
    requests: Sequence[Request], positions: Sequence[int], vocab_size: int
) -> Adjustments:
    """What changes the logits of rows: row i chooses the token of requests[i] at positions[i], and
    the rows of one request are in order. What comes before a position are the request's tokens,
    drafts among them.

    A request whose mask raises, or allows no token, has its `error` set, and no mask: the others of
    the step know nothing of it. After a draft it loses that draft and those that follow it instead:
    the mask fails again, as an error, if the draft was right.
    """
    rows = []
    for row, (request, position) in enumerate(zip(requests, positions, strict=True)):
        if position > request.num_tokens or not request.adjusts_logits(position):
            continue
        params, known = request.params, request.token_ids[:position]
        seen = sorted(set(known)) if params.repetition_penalty != 1.0 else []
        counted = params.presence_penalty or params.frequency_penalty
        output = known[request.num_prompt_tokens :] if counted else []
        forbidden = [] if request.may_stop(position) else list(request.stop_ids)
        allowed = None
        if params.masks:
            try:
                allowed = _allowed(request, position, vocab_size)
                _require_a_token(request, position, allowed, forbidden)
            except Exception as error:
                if row and requests[row - 1] is request:
                    del request.token_ids[position - 1 :]
                    continue
                request.error = error
        rows.append(RowAdjustment(row, params, seen, output, forbidden, allowed))
    return Adjustments(tuple(rows))


def _allowed(request: Request, position: int, vocab_size: int) -> Tensor:
    """The tokens that its masks allow: bool [vocab]. Raises what its `token_mask` does, and
    BadInput where that names no token ids."""
    given: list[Any] = [request.params.allowed_token_ids]
    if request.params.token_mask is not None:
        start = request.num_prompt_tokens
        prompt, output = request.token_ids[:start], request.token_ids[start:position]
        given.append(request.params.token_mask(prompt, output))
    allowed = torch.ones(vocab_size, dtype=torch.bool)
    for ids in given:
        if ids is None:
            continue
        ids = torch.as_tensor(ids if hasattr(ids, "shape") else list(ids)).cpu()
        if ids.numel() == 0:
            ids = ids.long()  # nothing has no type
        if ids.dtype is not torch.bool and (ids.is_floating_point() or (ids < 0).any()):
            raise BadInput(
                f"request {request.request_id}: a mask of token ids holds what is none: "
                f"{ids[:8].tolist()}"
            )
        named = torch.zeros(vocab_size, dtype=torch.bool)
        # An id that does not exist is an error here; on a GPU it would be a crash.
        named[ids if ids.dtype is torch.bool else ids.long()] = True
        allowed &= named
    return allowed


def _require_a_token(
    request: Request, position: int, allowed: Tensor, forbidden: list[int]
) -> None:
    if allowed.sum() <= allowed[forbidden].sum():
        raise BadInput(
            f"request {request.request_id}: its masks allow no token after "
            f"{position - request.num_prompt_tokens} generated ones; let them allow one that ends "
            "the output, and one that does not before min_tokens"
        )
