"""Logits of every position of a sequence, for parity and perplexity."""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.engine.batch_inputs import pack
from minivllm.engine.engine import Engine
from minivllm.engine.options import SamplingParams
from minivllm.engine.request import Request
from minivllm.engine.step import ScheduledRequest
from minivllm.errors import BadInput, NonFiniteLogits
from minivllm.models.vision.inputs import RequestInputs


def sequence_logits(
    engine: Engine, token_ids: list[int], inputs: RequestInputs | None = None
) -> Tensor:
    """Logits of every position of one sequence: float32 [tokens, vocab], on the engine's device.

    It goes through the same cache, attention and chunking as a request does. Some tokens may stand
    for the images of `inputs`.

    Raises:
        BadInput: the sequence is empty or longer than the context or the cache.
        NonFiniteLogits: a position's logits are NaN, infinite or all -inf.
        RuntimeError: requests are being served.
    """
    if engine.has_unfinished:
        raise RuntimeError("logits() shares the cache with requests: finish or abort them first")
    if not 0 < len(token_ids) <= engine.max_model_len:
        raise BadInput(
            f"logits of {len(token_ids)} tokens: give 1 to {engine.max_model_len}, the context's "
            "length"
        )
    engine.input_processor.check_ids("logits: token ids", token_ids)
    cache, params = engine.cache, SamplingParams()
    request = Request("logits", token_ids, params, max_num_tokens=len(token_ids) + 1, seed=0)
    request.inputs = inputs
    if cache.footprint(len(token_ids)) > cache.capacity_tokens:
        raise BadInput(
            f"{len(token_ids)} tokens do not fit the KV cache of {cache.capacity_tokens}; "
            "raise cache.num_blocks or cache.memory_fraction"
        )
    step = (
        engine.scheduler.policy.max_num_batched_tokens
        if engine.scheduler.chunks
        else len(token_ids)
    )
    pieces = []
    try:
        while (start := request.num_computed_tokens) < len(token_ids):
            count = min(step, len(token_ids) - start)
            if cache.evictor is not None:
                count = min(count, cache.evictor.room(request.cache, start))
            cache.grow(request.cache, start, start + count)
            engine.transfers.run(cache.take_transfers())  # of cached blocks that this takes
            parts = [ScheduledRequest(request, start, count)]
            packed = pack(parts, cache.layout.block_size, all_logits=True)._replace(
                inputs=engine.launcher.inputs(parts)
            )
            logits = engine.launcher.run(parts, packed).logits
            assert logits is not None
            pieces.append(require_finite(logits.to(torch.float32, copy=True), start))
            request.num_computed_tokens = computed = start + count
            if cache.evictor is not None:
                cache.evictor.evict(request.cache, computed, request.max_num_tokens)
        return torch.cat(pieces)
    finally:
        cache.free(request.cache)


def require_finite(logits: Tensor, start: int) -> Tensor:
    """The logits [T, vocab] of a sequence's tokens from `start` on.

    Raises:
        NonFiniteLogits: of one of them they are NaN, infinite or all -inf.
    """
    finite = logits.amax(-1).isfinite()
    if not finite.all():
        raise NonFiniteLogits.of("logits", start + int(finite.long().argmin()) + 1)
    return logits
