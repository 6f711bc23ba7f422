"""Logit processors: biases, penalties, tokens that may not end an output yet, and masks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from minivllm.engine.options import SamplingParams
from minivllm.engine.request import Request
from minivllm.errors import BadInput
from minivllm.extras.masks.bitmask import (
    allow,
    allows_any,
    apply_bitmask,
    every_token,
    forbid,
    intersect,
    num_bytes,
    row_of,
)
from minivllm.platform.given import FLOAT32

if TYPE_CHECKING:
    from minivllm.extras.masks.structured import Grammars


class RowAdjustment(NamedTuple):
    """What a request's bias and penalties change in one row of logits."""

    row: int
    params: SamplingParams  # its bias and its penalties
    seen: list[int]  # tokens of prompt and output, which a repetition penalty goes by
    output: list[int]  # tokens of the output, which the other penalties go by

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


class Adjustments(NamedTuple):
    """What changes the logits of a step; see LogitsAdjustment."""

    num_rows: int  # with a bias, a penalty or a mask
    rows: tuple[RowAdjustment, ...]
    masked: tuple[int, ...]  # M rows with a mask, in order
    bits: bytearray  # their masks, int32 [M, ceil(vocab / 32)], see bitmask.py

    def apply(self, logits: Tensor) -> None:
        for one in self.rows:
            one.apply(logits[one.row])
        if self.masked:
            apply_bitmask(logits, self.masked, self.bits)


def adjust_logits(
    requests: Sequence[Request],
    positions: Sequence[int],
    vocab_size: int,
    grammars: Grammars | None = None,
) -> Adjustments:
    """What changes the logits of rows: row i chooses the token of requests[i] at positions[i], and
    the rows of one request are in order. What comes before a position are the request's tokens,
    drafts among them.

    A request whose mask raises, or allows no token, has its `error` set, and no mask: the others of
    the step know nothing of it. After a draft it loses that draft and those that follow it instead:
    the mask fails again, as an error, if the draft was right.

    Args:
        requests, positions: S of them.
        vocab_size: of the model.
        grammars: of requests with structured outputs.
    """
    rows: list[RowAdjustment] = []
    masked: list[int] = []
    bits, count = bytearray(), 0
    for row, (request, position) in enumerate(zip(requests, positions, strict=True)):
        if position > request.num_tokens or not request.adjusts_logits(position):
            continue
        params, known = request.params, request.token_ids[:position]
        try:
            mask = _mask(request, position, vocab_size, grammars)
        except Exception as error:
            if row and requests[row - 1] is request:
                del request.token_ids[position - 1 :]
                continue
            request.error, mask = error, None
        count += params.adjusts_logits
        if mask is not None:
            masked.append(row)
            bits += mask
        seen = sorted(set(known)) if params.repetition_penalty != 1.0 else []
        counted = params.presence_penalty or params.frequency_penalty
        output = known[request.num_prompt_tokens :] if counted else []
        if params.logit_bias or seen or output:
            rows.append(RowAdjustment(row, params, seen, output))
    return Adjustments(count, tuple(rows), tuple(masked), bits)


def _mask(
    request: Request, position: int, vocab_size: int, grammars: Grammars | None
) -> bytearray | None:
    """The tokens that its masks and `min_tokens` allow; None: all. Raises what its `token_mask`
    does, and BadInput where that names no token ids, or no token is left."""
    params = request.params
    forbidden = () if request.may_stop(position) else request.stop_ids
    if not (params.masks or forbidden):
        return None
    mask = bytearray(_every(vocab_size))
    if params.allowed_token_ids is not None:
        intersect(mask, _of_ids(params.allowed_token_ids, vocab_size))
    start = request.num_prompt_tokens
    if params.token_mask is not None:
        prompt, output = request.token_ids[:start], request.token_ids[start:position]
        given = params.token_mask(prompt, output)
        if given is not None:
            intersect(mask, _row(request, given, vocab_size))
    if params.structured_outputs is not None and grammars is not None:
        allowed = grammars.mask(request, request.token_ids[start:position])
        if allowed is not None:
            intersect(mask, allowed)
    forbid(mask, forbidden)
    if params.masks and not allows_any(mask):
        raise BadInput(
            f"request {request.request_id}: its masks allow no token after {position - start} "
            "generated ones; let them allow one that ends the output, and one that does not "
            "before min_tokens"
        )
    return mask


@cache
def _every(vocab_size: int) -> bytes:
    return bytes(every_token(vocab_size))


@lru_cache(64)
def _of_ids(ids: tuple[int, ...], vocab_size: int) -> bytes:
    mask = bytearray(num_bytes(vocab_size))
    allow(mask, ids)
    return bytes(mask)


def _row(request: Request, ids: Iterable[int] | Any, vocab_size: int) -> bytearray:
    """The mask of what a `token_mask` gave: ids, or bool [vocab]."""
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
    return row_of(named)
