"""The sampler beside the plainest way to the same tokens. Greedy tokens and, on a GPU, draws
without filters are kernels; the others are torch's operations, well chosen."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from minivllm.bench.microbench.case import ITEM, Case, Setting, Side
from minivllm.engine.batch_inputs import Sampling, SamplingColumns, pack_columns, pack_draws
from minivllm.engine.executor import sampler_ops
from minivllm.engine.options import SamplingParams
from minivllm.engine.request import Request
from minivllm.engine.sampler import (
    SampledTokens,
    SamplerCounters,
    choose,
    draw,
    exponential_noise,
    filter_probs,
)

TOP_K, TOP_P = 20, 0.9
_LIKELY = 64  # tokens that stand out, or 16-bit noise would have many of the same rank


def cases(setting: Setting) -> Iterator[Case]:
    """Greedy, drawn from the likeliest, and with Triton from all tokens."""
    for rows in setting.rows:
        yield _case(setting, "sampling greedy", SamplingParams(), rows)
        top = min(TOP_K, setting.model.vocab_size // 4)
        drawn = SamplingParams(temperature=1.0, top_k=top, top_p=TOP_P)
        yield _case(setting, f"sampling top_k {top} top_p {TOP_P}", drawn, rows)
        if setting.triton:
            yield _case(setting, "sampling from all", SamplingParams(temperature=1.0), rows)


def _logits(setting: Setting, copies: int, rows: int) -> Tensor:
    """[copies, rows, vocab] with a few likely tokens, all of different scores."""
    vocab = setting.model.vocab_size
    logits = setting.random(copies, rows, vocab)
    count = min(_LIKELY, vocab // 2)
    places = torch.randperm(vocab, device=setting.device)[:count]
    logits[..., places] = torch.linspace(8, 16, count, device=setting.device).to(logits.dtype)
    return logits


def _case(setting: Setting, kernel: str, params: SamplingParams, rows: int) -> Case:
    vocab = setting.model.vocab_size
    copies = setting.copies(ITEM * rows * vocab)
    logits = _logits(setting, copies, rows)
    requests = [Request(str(i), [i], params, max_num_tokens=8, seed=i) for i in range(rows)]
    positions = [1] * rows
    counters = SamplerCounters()
    ops = sampler_ops(setting.kernels, setting.triton)

    name, plain = "argmax", partial(torch.argmax, dim=-1)
    if params.top_k:
        name, plain = "sort", partial(_sorted_whole, requests=requests)
    elif not params.greedy:
        name, plain = "torch", partial(_drawn, requests=requests)

    def ours(i: int) -> Tensor:
        chosen = choose(logits[i % copies], Sampling(draws=pack_draws(requests, positions)), ops)
        return torch.tensor(SampledTokens(*chosen).read(counters))

    def theirs(i: int) -> Tensor:
        return plain(logits[i % copies]).cpu()

    return Case(
        kernel,
        f"vocabulary of {vocab}",
        rows,
        Side("sampler", ours),
        Side(name, theirs),
        bytes=ITEM * rows * vocab,
        operations=0.0,
        copies=copies,
        tolerance=0.0,
    )


def _columns(logits: Tensor, requests: list[Request]) -> SamplingColumns:
    columns = pack_columns(requests, range(len(requests)), [1] * len(requests))
    return SamplingColumns.upload(columns, logits.device)


def _drawn(logits: Tensor, requests: list[Request]) -> Tensor:
    """The same draws by torch's operations: int64 [rows]."""
    return draw(logits, _columns(logits, requests))


def _sorted_whole(logits: Tensor, requests: list[Request]) -> Tensor:
    """The same draws, from the whole vocabulary in order: int64 [rows]."""
    scores, token_ids = logits.float().sort(dim=-1, descending=True, stable=True)
    columns = _columns(logits, requests)
    probs = filter_probs(scores.softmax(-1), columns)
    noise = exponential_noise(columns.seeds, columns.positions.long(), token_ids)
    picks = (probs / noise).argmax(-1, keepdim=True)
    return token_ids.gather(1, picks)[:, 0]
