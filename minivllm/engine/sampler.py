"""Stateless sampling: logits and a request's own tokens, seed and position decide the next
token."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minivllm.engine.batch_inputs import SamplingColumns, pack_sampling
from minivllm.engine.logprobs import top_logprobs
from minivllm.engine.request import Request
from minivllm.errors import BadInput
from minivllm.kernels.transfer import Download, upload
from minivllm.platform.given import FLOAT32

MASK32 = 0xFFFFFFFF
# Sets keys apart from tokens: else a seed of a small hash, such as 0, draws at each position the
# token of that number.
SEED_SALT = 0x9E3779B9


@dataclass
class SamplerCounters:
    """What the sampler did, for the liveness of its knobs."""

    tokens_drawn: int = 0  # not just the most likely
    drawn_fused: int = 0  # of these, in a kernel of its own (runtime.fused_kernels)
    rows_adjusted: int = 0  # logits changed by a bias, a penalty or a mask
    tokens_changed: int = 0  # by any of these: not what the model finds most likely


class SampledToken(NamedTuple):
    """The chosen token of one request, with log-probabilities if it asked for them."""

    token_id: int  # below 0: there is none, its logits are not finite
    logprobs: dict[int, float] | None = None  # token id -> natural log of the model's probability


def _mix(x: Tensor) -> Tensor:
    """A 32-bit integer hash (lowbias32, Wellons 2018), on int64 tensors holding 32-bit values."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & MASK32
    return x ^ (x >> 16)


def exponential_noise(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Exponential(1) noise that depends on (seed, position, token) alone.

    Args:
        seeds, positions: int64 [R].
        token_ids: int64 [1 or R, K].

    Returns:
        float32 [R, K], above 0, the same on every device and in every batch.
    """
    state = _mix((seeds & MASK32) ^ _mix((seeds >> 32) & MASK32))
    key = _mix(_mix(state ^ (positions & MASK32)) ^ SEED_SALT)
    bits = _mix(_mix(token_ids) ^ key[:, None])
    # Rounding may make the uniform number 1, whose noise is infinite: that token is just not drawn.
    # It cannot be 0, whose noise would draw a token of probability 0.
    return -torch.log1p(-(bits.float() + 0.5) * 2.0**-32)


def adjust(logits: Tensor, requests: Sequence[Request]) -> int:
    """Change float32 logits [R, vocab] in place as requests ask: bias, penalties, no early end,
    masks. What becomes too large for float32 is the largest number that it holds.

    Returns:
        How many rows have a bias, a penalty or a mask. A request whose mask raises, or allows no
        token, has its `error`
        set: the others of the step know nothing of it.
    """
    adjusted = 0
    for row, request in enumerate(requests):
        params = request.params
        adjusted += params.adjusts_logits
        if params.logit_bias:
            biased = torch.tensor(list(params.logit_bias), device=logits.device)
            values = logits[row, biased] + torch.tensor(
                [*params.logit_bias.values()], device=logits.device
            )
            logits[row, biased] = values.clamp_(max=FLOAT32)
        if params.repetition_penalty != 1.0:
            seen = torch.tensor(sorted(set(request.token_ids)), device=logits.device)
            values = logits[row, seen]
            factor = params.repetition_penalty
            logits[row, seen] = torch.where(values > 0, values / factor, values * factor).clamp_(
                max=FLOAT32
            )
        if request.num_output_tokens and (params.presence_penalty or params.frequency_penalty):
            output = torch.tensor(request.output_token_ids, device=logits.device)
            counts = torch.bincount(output, minlength=logits.shape[1])
            logits[row] -= params.frequency_penalty * counts + params.presence_penalty * (
                counts > 0
            )
        if not request.may_stop and request.stop_ids:
            logits[row, list(request.stop_ids)] = -math.inf
        if params.masks:
            try:
                _apply_masks(logits[row], request)
            except Exception as error:
                request.error = error
    return adjusted


def _apply_masks(logits: Tensor, request: Request) -> None:
    """Leave [vocab] logits of allowed tokens only. Raises what the request's `token_mask` does, or
    BadInput where no token is left."""
    allowed: list[Any] = [request.params.allowed_token_ids]
    if request.params.token_mask is not None:
        prompt = request.token_ids[: request.num_prompt_tokens]
        allowed.append(request.params.token_mask(prompt, request.output_token_ids))
    for ids in allowed:
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
        forbidden = torch.ones(len(logits), dtype=torch.bool)
        # An id that does not exist is an error here; on a GPU it would be a crash.
        forbidden[ids if ids.dtype is torch.bool else ids.long()] = False
        logits.masked_fill_(forbidden.to(logits.device), -math.inf)
    if logits.max() == -math.inf:
        raise BadInput(
            f"request {request.request_id}: its masks allow no token after "
            f"{request.num_output_tokens} generated ones; let them allow one that ends the "
            "output, and one that does not before min_tokens"
        )


def filter_probs(probs: Tensor, columns: SamplingColumns) -> Tensor:
    """Zero the probabilities that top-k, top-p and min-p leave out.

    Args:
        probs: float32 [R, K], each row in descending order, of the K most likely tokens; K is at
            least the largest top-k, or all tokens where a row has none.
        columns: of the R requests.

    Returns:
        [R, K], not normalised.
    """
    width = probs.shape[1]
    ranks = torch.arange(width, device=probs.device)[None, :]
    keep = (ranks < columns.top_k[:, None]) | (columns.top_k == 0)[:, None]
    kept = probs * keep
    # top-p is measured on what top-k left; the token that crosses p is kept. In whole numbers,
    # since the order in which a GPU adds up is not said, and torch refuses to where
    # runtime.determinism asks for the same bits.
    units = (kept.double() * 2.0**40).long()
    before = units.cumsum(dim=-1) - units
    top_p = columns.top_p.double()[:, None]
    keep &= (before < top_p * units.sum(dim=-1, keepdim=True)) | (top_p == 1)
    keep &= probs >= columns.min_p[:, None] * probs[:, :1]
    return probs * keep


class SampledTokens:
    """The chosen tokens of a step: on the device at once, on the host when somebody reads them.

    Args:
        tokens: int64 [R], on the device.
        argmax: int64 [R], the model's own argmax, see the function below; None where that is what
            was chosen.
        logits: [R, vocab], of the step, if a request wants log-probabilities.
        counts: how many of them each request wants.
    """

    def __init__(
        self,
        tokens: Tensor,
        argmax: Tensor | None = None,
        logits: Tensor | None = None,
        counts: Sequence[int | None] = (),
    ) -> None:
        self.tokens = tokens
        self._logits, self._counts = logits, counts
        self._compared = argmax is not None
        self._host = Download(tokens if argmax is None else torch.stack((tokens, argmax)))

    def read(self, counters: SamplerCounters) -> list[SampledToken]:
        """Wait for the tokens. `counters` are told how many are not the model's own argmax."""
        chosen = self._host.values()
        if self._compared:
            chosen, argmax = chosen
            counters.tokens_changed += sum(a != b for a, b in zip(chosen, argmax, strict=True))
            if min(argmax) < 0:
                chosen = [min(pair) for pair in zip(chosen, argmax, strict=True)]
        if self._logits is None:
            return [SampledToken(token) for token in chosen]
        logprobs = top_logprobs(self._logits, [max(token, 0) for token in chosen], self._counts)
        return [SampledToken(token, entry) for token, entry in zip(chosen, logprobs, strict=True)]


def argmax(logits: Tensor) -> Tensor:
    """The first of the largest logits [R, vocab] of each row, int64 [R]; -1 - token where that
    logit is not finite: NaN is larger than all.

    torch.argmax is not vectorised in bfloat16 on a CPU: of its 9 ms for 32 rows of 151,936 max
    takes half, and the C++ kernel a thirtieth.
    """
    values, tokens = logits.max(dim=-1)
    return torch.where(values.isfinite(), tokens, -1 - tokens)


def draw(scores: Tensor, columns: SamplingColumns, top_k_bound: int | None = None) -> Tensor:
    """One draw a row.

    Args:
        scores: [R, vocab], any float dtype.
        columns: of the R requests.
        top_k_bound: the largest top-k; None where no row has a filter.

    Returns:
        int64 [R]; of a row of temperature 0 any token.
    """
    scores = scores.float()
    if top_k_bound is not None:
        # Only as many tokens as a row may keep are put in order: a whole vocabulary takes long to
        # sort.
        scores, token_ids = scores.topk(min(top_k_bound, scores.shape[1]), dim=-1)
    else:
        token_ids = torch.arange(scores.shape[1], device=scores.device)[None, :]
    # Counted from the largest: divided as they are, large ones would be infinite.
    probs = torch.softmax((scores - scores.amax(-1, True)) / columns.temperatures[:, None], dim=-1)
    if top_k_bound is not None:
        probs = filter_probs(probs, columns)
    noise = exponential_noise(columns.seeds, columns.positions.long(), token_ids)
    picks = (probs / noise).argmax(dim=-1, keepdim=True)
    return token_ids.expand(len(probs), -1).gather(1, picks)[:, 0]


@dataclass(frozen=True, slots=True)
class SamplerOps:
    """What tokens are chosen with: functions that do what torch's operations do, which are here
    where no kernel is.

    Args:
        argmax: see the function above.
        draw: see the function above.
        fused: whether a draw without filters is a kernel of its own.
    """

    argmax: Callable[[Tensor], Tensor] = argmax
    draw: Callable[[Tensor, SamplingColumns, int | None], Tensor] = draw
    fused: bool = False


TORCH = SamplerOps()


def sample(
    logits: Tensor,
    requests: Sequence[Request],
    counters: SamplerCounters,
    one_by_one: bool = False,
    kernels: SamplerOps = TORCH,
) -> SampledTokens:
    """Choose each request's next token.

    Greedy rows take the argmax; the others the argmax of p / Exponential(1), which draws from p
    (the exponential race, as nano-vllm uses it) with noise from (seed, position). Nothing waits for
    the device but a request's mask.

    Args:
        logits: [R, vocab], any float dtype; row i belongs to requests[i].
        counters: are told what was done.
        one_by_one: draw for each request by itself, so that no shape depends on the others.
        kernels: to choose with.
    """
    counts = [r.params.logprobs for r in requests]
    kept = logits if any(count is not None for count in counts) else None
    if all(r.params.takes_likeliest and r.may_stop for r in requests):
        return SampledTokens(kernels.argmax(logits), None, kept, counts)
    with torch.inference_mode():  # only here: entering it takes microseconds
        return SampledTokens(
            *_choose(logits, requests, counters, one_by_one, kernels), kept, counts
        )


def _choose(
    logits: Tensor,
    requests: Sequence[Request],
    counters: SamplerCounters,
    one_by_one: bool,
    kernels: SamplerOps,
) -> tuple[Tensor, Tensor]:
    """What each request gets and the model's own argmax, int64 [R] each; see `sample`."""
    scores = logits.float() if logits.dtype != torch.float32 else logits.clone()
    counters.rows_adjusted += adjust(scores, requests)
    picks = kernels.argmax(scores)
    rows = [i for i, request in enumerate(requests) if not request.params.greedy]
    counters.tokens_drawn += len(rows)
    # Filters are not for the others: a row is drawn in the same way whoever is beside it, and none
    # is sorted for nothing.
    alike = [[i for i in rows if requests[i].params.filters is kind] for kind in (False, True)]
    for group in [[row] for row in rows] if one_by_one else filter(None, alike):
        members = [requests[i] for i in group]
        columns = SamplingColumns.unpack(upload(pack_sampling(members, group), logits.device))
        some = scores if len(group) == len(requests) else scores.index_select(0, columns.rows)
        top_k_bound = _top_k_bound(members)
        counters.drawn_fused += len(group) * (kernels.fused and top_k_bound is None)
        picks.index_copy_(0, columns.rows.long(), kernels.draw(some, columns, top_k_bound))
    return picks, kernels.argmax(logits)


def _top_k_bound(requests: Sequence[Request]) -> int | None:
    """How many of the most likely tokens a draw has to look at: infinitely many where a filter
    names no number; None where nothing is filtered."""
    params = [request.params for request in requests]
    return max(p.top_k or sys.maxsize for p in params) if any(p.filters for p in params) else None
