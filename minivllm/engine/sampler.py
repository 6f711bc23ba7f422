"""Stateless sampling: logits and a request's own tokens, seed and position decide the next
token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm.engine.batch_inputs import Sampling, SamplingColumns
from minivllm.kernels.ranking import largest
from minivllm.kernels.transfer import Download

MASK32 = 0xFFFFFFFF
# Separates keys from token ids: otherwise a seed with a small hash, such as 0, draws token p at
# position p.
SEED_SALT = 0x9E3779B9


@dataclass
class SamplerCounters:
    """What the sampler did, for the liveness of its knobs."""

    tokens_drawn: int = 0  # sampled, not greedy
    drawn_fused: int = 0  # of these, in a fused kernel (runtime.fused_kernels)
    rows_adjusted: int = 0  # logits changed by a bias, a penalty or a mask
    tokens_changed: int = 0  # tokens that are not the model's own argmax

    def note(self, sampling: Sampling, fused: bool) -> None:
        """Count the rows of a step. `fused`: draws without filters are a kernel of their own."""
        for draw in sampling.draws:
            self.tokens_drawn += draw.num_rows
            self.drawn_fused += draw.num_rows * (fused and draw.top_k_bound is None)
        if sampling.adjustment is not None:
            self.rows_adjusted += sampling.adjustment.num_rows


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


def filter_probs(probs: Tensor, columns: SamplingColumns) -> Tensor:
    """Zero the probabilities that top-k, top-p and min-p leave out.

    Args:
        probs: float32 [R, K], each row in descending order, of the K most likely tokens, times any
            factor; K is at least the largest top-k, or all tokens where a row has none.
        columns: of the R requests.

    Returns:
        [R, K], not normalised.
    """
    ranks = torch.arange(probs.shape[1], device=probs.device)[None, :]
    keep = (ranks < columns.top_k[:, None]) | (columns.top_k == 0)[:, None]
    kept = probs * keep
    # top-p is measured on what top-k left; the token that crosses p is kept. Integers are
    # summed: a GPU adds floats in no fixed order, which torch rejects under runtime.determinism.
    units = (kept.double() * 2.0**40).long()
    before = units.cumsum(dim=-1) - units
    top_p = columns.top_p.double()[:, None]
    keep &= (before < top_p * units.sum(dim=-1, keepdim=True)) | (top_p == 1)
    keep &= probs >= columns.min_p[:, None] * probs[:, :1]
    return probs * keep


class SampledTokens:
    """The chosen tokens of a step, on their way to the host.

    Args:
        tokens: int64 [R], on the device.
        argmax: int64 [R], the model's own argmax, see the function below; None where that is what
            was chosen.
    """

    def __init__(self, tokens: Tensor, argmax: Tensor | None = None) -> None:
        self._compared = argmax is not None
        self._host = Download(tokens if argmax is None else torch.stack((tokens, argmax)))

    def read(self, counters: SamplerCounters) -> list[int]:
        """Wait for the tokens; one is below 0 where its logits are not finite. `counters` get the
        number of those that are not the model's own argmax."""
        chosen = self._host.values()
        if self._compared:
            chosen, argmax = chosen
            counters.tokens_changed += sum(a != b for a, b in zip(chosen, argmax, strict=True))
            if min(argmax) < 0:
                chosen = [a if b >= 0 else min(a, b) for a, b in zip(chosen, argmax, strict=True)]
        return chosen


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
        # Only the tokens that a row may keep are sorted: sorting a whole vocabulary is slow.
        scores, token_ids = largest(scores, min(top_k_bound, scores.shape[1]))
    else:
        token_ids = torch.arange(scores.shape[1], device=scores.device)[None, :]
    # Relative to the largest score: large scores would overflow when divided. Not normalised: the
    # sum depends on how many tokens are sorted, and neither filters nor the race need it.
    probs = ((scores - scores.amax(-1, True)) / columns.temperatures[:, None]).exp()
    if top_k_bound is not None:
        probs = filter_probs(probs, columns)
    noise = exponential_noise(columns.seeds, columns.positions.long(), token_ids)
    indices = (probs / noise).argmax(dim=-1, keepdim=True)
    return token_ids.expand(len(probs), -1).gather(1, indices)[:, 0]


@dataclass(frozen=True, slots=True)
class SamplerOps:
    """The operations that choose tokens: torch's, or kernels in their place.

    Args:
        argmax: see the function above.
        draw: see the function above; of rows without filters.
        fused: whether `draw` is Triton's.
    """

    argmax: Callable[[Tensor], Tensor] = argmax
    draw: Callable[[Tensor, SamplingColumns], Tensor] = draw
    fused: bool = False


TORCH = SamplerOps()


def choose(
    logits: Tensor, sampling: Sampling, ops: SamplerOps = TORCH
) -> tuple[Tensor, Tensor | None]:
    """Choose tokens.

    Greedy rows take the argmax; the others the argmax of p / Exponential(1), which draws from p
    (the exponential race, as nano-vllm uses it) with noise from (seed, position). Nothing waits for
    the device but an adjustment.

    Args:
        logits: [L, vocab], any float dtype.
        sampling: how S tokens are chosen from them.
        ops: to choose with.

    Returns:
        The tokens and the model's own argmax, int64 [S] each, see `argmax`; None in place of the
        latter where that is what was chosen.
    """
    if sampling.rows is not None:
        logits = logits[list(sampling.rows)]
    own = ops.argmax(logits)
    if sampling.is_greedy:
        return own, None
    with torch.inference_mode():  # entering it takes microseconds
        tokens, scores = own.clone(), logits
        if sampling.adjustment is not None:
            scores = logits.to(torch.float32, copy=True)
            sampling.adjustment.apply(scores)
            tokens = ops.argmax(scores)
        for part in sampling.draws:
            columns = SamplingColumns.upload(part.columns, logits.device)
            rows, bound = columns.rows.long(), part.top_k_bound
            some = scores if part.num_rows == len(scores) else scores.index_select(0, rows)
            drawn = ops.draw(some, columns) if bound is None else draw(some, columns, bound)
            tokens.index_copy_(0, rows, drawn)
        return tokens, own
