"""Logits to tokens as an engine takes them, with every extra."""

from __future__ import annotations

from torch import Tensor

from minivllm.engine.batch_inputs import Sampling, pack_draws
from minivllm.engine.request import Request
from minivllm.engine.sampler import TORCH, SampledTokens, SamplerCounters, SamplerOps, choose
from minivllm.extras.adjust_logits import adjust_logits


def sample(
    logits: Tensor,
    requests: list[Request],
    counters: SamplerCounters | None = None,
    one_by_one: bool = False,
    ops: SamplerOps = TORCH,
) -> list[int]:
    """The tokens of requests; row i of the logits [R, vocab] belongs to requests[i]."""
    counters = counters or SamplerCounters()
    positions = [request.num_tokens for request in requests]
    adjusts = any(map(Request.adjusts_logits, requests, positions))
    sampling = Sampling(
        draws=pack_draws(requests, positions, one_by_one),
        adjustment=adjust_logits(requests, positions, logits.shape[1]) if adjusts else None,
    )
    counters.note(sampling, ops.fused)
    return SampledTokens(*choose(logits, sampling, ops)).read(counters)
