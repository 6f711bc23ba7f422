"""A step's tokens, each logit read once: the largest of a row, or a draw from all of a row's
tokens.

A draw is the race of engine/sampler.py, the largest p / e, in logarithms: the largest of logit / T
- log(e). The noise e is the same function of (seed, position, token). Vocabularies are cut into
blocks of one size, so that few rows keep a GPU busy as well and a row's token does not depend on
how many rows there are; a second kernel compares the blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm.engine import sampler
from minivllm.engine.batch_inputs import SamplingColumns

BLOCK = 2048  # tokens of a program
_APART = tl.constexpr(sampler.SEED_SALT)
# How these are aligned goes by the number of requests, which is no reason to compile again.
_COLUMNS = ["seeds", "positions", "temperatures"]


@triton.jit
def _mix(x):
    """See sampler._mix; of uint32, which wraps by itself."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _noise(seed, position, tokens):
    """See sampler.exponential_noise; of an int64 seed, an int32 position and int32 tokens."""
    state = _mix(seed.to(tl.uint32) ^ _mix((seed >> 32).to(tl.uint32)))
    key = _mix(_mix(state ^ position.to(tl.uint32)) ^ _APART)
    bits = _mix(_mix(tokens.to(tl.uint32)) ^ key)
    u = (bits.to(tl.float32) + 0.5) * 2.0**-32
    # -log1p(-u): what was lost when 1 - u was rounded is small and is added as it is.
    rest = 1.0 - u
    return (u - (1.0 - rest)) - tl.log(rest)


@triton.jit
def _inverse(temperature):
    """1 / temperature; 1 in a row that does not draw, of whose token nobody asks."""
    return 1.0 / tl.where(temperature > 0.0, temperature, 1.0)


@triton.jit(do_not_specialize_on_alignment=_COLUMNS)
def _best_of_block(
    logits,
    seeds,
    positions,
    temperatures,
    tops,
    scores,
    tokens,
    vocab,
    DRAWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row and BLOCK of its tokens a program.

    Scores count from the block's largest logit, as a softmax does, so that a low temperature takes
    no digits from them.
    """
    row = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < vocab
    score = tl.load(logits + row.to(tl.int64) * vocab + i, mask=inside, other=-float("inf")).to(
        tl.float32
    )
    score = tl.where(score == score, score, float("inf"))  # a maximum would lose NaN
    best = tl.max(score, 0)
    place = row * tl.num_programs(1) + tl.program_id(1)
    if DRAWS:
        tl.store(tops + place, best)
        origin = tl.where(best > -float("inf"), best, 0.0)
        noise = _noise(tl.load(seeds + row), tl.load(positions + row), i)
        score = (score - origin) * _inverse(tl.load(temperatures + row)) - tl.log(noise)
        best = tl.max(score, 0)
    tl.store(scores + place, best)
    # Where none is as good as the best there is no number among them: then any token, but one that
    # exists.
    tl.store(tokens + place, tl.min(tl.where(inside & (score == best), i, vocab - 1), 0))


@triton.jit(do_not_specialize_on_alignment=["temperatures"])
def _best_of_row(
    tops,
    scores,
    tokens,
    temperatures,
    out,
    blocks,
    DRAWS: tl.constexpr,
    FLAG: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program: the best of its blocks, the first of those that are as good."""
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    inside = i < blocks
    place = row * blocks + i
    score = tl.load(scores + place, mask=inside, other=-float("inf"))
    if DRAWS:
        top = tl.load(tops + place, mask=inside, other=-float("inf"))
        score += (top - tl.max(top, 0)) * _inverse(tl.load(temperatures + row))
    token = tl.load(tokens + place, mask=inside, other=0)
    best = tl.max(score, 0)
    first = tl.min(tl.where(inside & (score == best), i, BLOCK), 0)
    chosen = tl.sum(tl.where(i == first, token, 0), 0).to(tl.int64)
    if FLAG:
        chosen = tl.where(tl.abs(best) < float("inf"), chosen, -1 - chosen)
    tl.store(out + row, chosen)


def argmax(logits: Tensor, flag: bool = False) -> Tensor:
    """See sampler.argmax, which flags rows without a finite largest logit; here only with
    `flag`."""
    return _best(logits, None, flag)


def draw(scores: Tensor, columns: SamplingColumns) -> Tensor:
    """See sampler.draw; of rows without filters.

    Scores are rounded in another way than there, so another token is drawn where two are equally
    good up to the last bits of float32: one in some 100,000.
    """
    return _best(scores, columns)


def _best(logits: Tensor, columns: SamplingColumns | None, flag: bool = False) -> Tensor:
    logits = logits.contiguous()
    (rows, vocab), device = logits.shape, logits.device
    blocks = triton.cdiv(vocab, BLOCK)
    scores = torch.empty(rows, blocks, dtype=torch.float32, device=device)
    tops, tokens = torch.empty_like(scores), torch.empty_like(scores, dtype=torch.int32)
    out = torch.empty(rows, dtype=torch.int64, device=device)
    draws = columns is not None
    # which are not read where nothing is drawn
    seeds, positions, temperatures = out, tokens, scores
    if columns is not None:
        seeds, positions, temperatures = columns.seeds, columns.positions, columns.temperatures
    _best_of_block[(rows, blocks)](
        logits,
        seeds,
        positions,
        temperatures,
        tops,
        scores,
        tokens,
        vocab,
        DRAWS=draws,
        BLOCK=BLOCK,
    )
    _best_of_row[(rows,)](
        tops,
        scores,
        tokens,
        temperatures,
        out,
        blocks,
        DRAWS=draws,
        FLAG=flag,
        BLOCK=triton.next_power_of_2(blocks),
    )
    return out
