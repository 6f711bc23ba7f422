"""Stateless sampling: logits and a request's own tokens, seed and position decide the next token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm.engine.request import Request

MASK32 = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Sampled:
    """The chosen token of one request, with log-probabilities if it asked for them."""

    token_id: int
    logprobs: dict[int, float] | None = None  # token id -> natural log of the model's probability


def _mix(x: Tensor) -> Tensor:
    """A 32-bit integer hash (lowbias32, Wellons 2018), on int64 tensors holding 32-bit values."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & MASK32
    return x ^ (x >> 16)


def exponential_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Exponential(1) noise that depends on (seed, position, token) alone.

    Args:
        seeds, positions: int64 [R].

    Returns:
        float32 [R, vocab_size], the same on every device and in every batch.
    """
    key = _mix(_mix((seeds & MASK32) ^ _mix((seeds >> 32) & MASK32)) ^ (positions & MASK32))
    tokens = torch.arange(vocab_size, device=seeds.device)
    bits = _mix(_mix(tokens)[None, :] ^ key[:, None])
    uniform = ((bits >> 8).float() + 0.5) * 2.0**-24  # in (0, 1), never 0 or 1
    return -torch.log(uniform)


def apply_penalties(logits: Tensor, requests: Sequence[Request]) -> None:
    """Change float32 logits [R, vocab] in place by repetition, presence and frequency penalties."""
    for row, request in enumerate(requests):
        params = request.params
        if not params.has_penalties:
            continue
        if params.repetition_penalty != 1.0:
            seen = torch.tensor(sorted(set(request.token_ids)), device=logits.device)
            values = logits[row, seen]
            factor = params.repetition_penalty
            logits[row, seen] = torch.where(values > 0, values / factor, values * factor)
        if request.num_output_tokens and (params.presence_penalty or params.frequency_penalty):
            output = torch.tensor(request.output_token_ids, device=logits.device)
            counts = torch.bincount(output, minlength=logits.shape[1])
            logits[row] -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)


def filter_probs(probs: Tensor, requests: Sequence[Request]) -> Tensor:
    """Zero the probabilities that top-k, top-p and min-p leave out. float32 [R, vocab], not renormalised."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=probs.device)[:, None]

    vocab = probs.shape[1]
    ranks = torch.arange(vocab, device=probs.device)[None, :]
    top_k = column([float(r.params.top_k or vocab) for r in requests])
    keep = ranks < top_k
    kept = ordered * keep
    # top-p is measured on what top-k left; the token that crosses p is kept.
    before = kept.cumsum(dim=-1) - kept
    keep &= before < column([r.params.top_p for r in requests]) * kept.sum(dim=-1, keepdim=True)
    keep &= ordered >= column([r.params.min_p for r in requests]) * ordered[:, :1]
    return torch.zeros_like(probs).scatter_(1, order, ordered * keep)


def top_logprobs(
    logits: Tensor, chosen: Sequence[int], counts: Sequence[int | None]
) -> list[dict[int, float] | None]:
    """Log-probabilities of the `counts[i]` likeliest tokens and of `chosen[i]`, for rows that ask (not None).

    They are the model's own, before temperature, penalties and filters.
    """
    result: list[dict[int, float] | None] = [None] * len(chosen)
    for row, count in enumerate(counts):
        if count is None:
            continue
        logprobs = torch.log_softmax(logits[row].float(), dim=-1)
        values, ids = logprobs.topk(min(count, logprobs.numel()))
        entries = {chosen[row]: float(logprobs[chosen[row]])}
        entries.update(zip(ids.tolist(), values.tolist(), strict=True))
        result[row] = entries
    return result


@torch.inference_mode()
def sample(logits: Tensor, requests: Sequence[Request]) -> list[Sampled]:
    """Choose each request's next token.

    Greedy rows take the argmax; the others the argmax of p / Exponential(1), which draws from p
    (the exponential race, as nano-vllm uses it) with noise from (seed, position).

    Args:
        logits: [R, vocab], any float dtype; row i belongs to requests[i].
    """
    plain = all(r.params.greedy and not r.params.has_penalties and r.may_stop for r in requests)
    if plain:
        chosen = logits.argmax(dim=-1).tolist()
    else:
        scores = logits.float().clone()
        apply_penalties(scores, requests)
        for row, request in enumerate(requests):
            if not request.may_stop and request.stop_ids:
                scores[row, list(request.stop_ids)] = float("-inf")
        picks = scores.argmax(dim=-1)
        rows = [i for i, request in enumerate(requests) if not request.params.greedy]
        if rows:
            drawn = [requests[i] for i in rows]
            picks[rows] = _draw(scores[rows], drawn)
        chosen = picks.tolist()
    counts = [r.params.logprobs for r in requests]
    logprobs = (
        top_logprobs(logits, chosen, counts) if any(c is not None for c in counts) else [None] * len(chosen)
    )
    return [Sampled(token, entry) for token, entry in zip(chosen, logprobs, strict=True)]


def _draw(scores: Tensor, requests: Sequence[Request]) -> Tensor:
    """One draw a row from float32 scores [R, vocab]: int64 [R]."""
    device = scores.device
    temperatures = torch.tensor([r.params.temperature for r in requests], device=device)[:, None]
    probs = torch.softmax(scores / temperatures, dim=-1)
    if any(r.params.top_k or r.params.top_p < 1 or r.params.min_p for r in requests):
        probs = filter_probs(probs, requests)
    seeds = torch.tensor([r.seed for r in requests], device=device)
    positions = torch.tensor([r.num_tokens for r in requests], device=device)
    return (probs / exponential_noise(seeds, positions, probs.shape[1])).argmax(dim=-1)
