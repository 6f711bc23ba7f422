"""Quality against a reference precision on the same tokens: the definitions, in numpy alone.

Perplexity is exp of the mean negative log-likelihood over windows that overlap (transformers'
"Perplexity of fixed-length models"); KL(reference || candidate) and top-1 agreement compare whole
distributions token by token, which tells far smaller changes apart than perplexity does; the
identical prefix compares greedy texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from minivllm.bench.records.feature_figures import Quality
from minivllm.engine.options import SamplingParams
from minivllm.engines.base import BenchEngine, LogitsEngine

LOG_PROBS = "logprobs.npy"
# positions at a time: with 151,936 tokens in the vocabulary these are 39 MB, not gigabytes
ROWS = 64
LEAST_FOR_P99 = 100

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Reference:
    """What the model says in the reference precision, and the tokens that it says it of.

    Args:
        id: content address: of the text, the checkpoint, the knobs, the code and the machine.
        precision: an option of quant.
        token_ids: of the text.
        num_bytes: of the text that they cover, UTF-8; None where the tokenizer does not give the
            text back.
        window, stride: tokens, see `spans`.
        perplexity: of the reference itself.
        top1: its likeliest token for each predicted one.
        kl_tokens: predicted tokens whose log-probabilities are stored.
        prompts: pieces of the text.
        continuations: what the reference greedily makes of them.
        folder: holds LOG_PROBS, float16 [kl_tokens, vocab].
    """

    id: str
    precision: str
    token_ids: list[int]
    num_bytes: int | None
    window: int
    stride: int
    perplexity: float
    top1: list[int]
    kl_tokens: int
    prompts: list[list[int]]
    continuations: list[list[int]]
    folder: Path


def spans(count: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Windows over `count` tokens as (begin, first, end): tokens [begin, end) are seen, [first,
    end) predicted.

    Every token is predicted once, in the first window that it lies in and, but for the first
    window, with at least `window - stride` tokens before it. The first token of a window that
    nothing precedes is not predicted.
    """
    seen = 0
    for begin in range(0, count, stride):
        end = min(begin + window, count)
        first = max(seen, begin + 1)
        if first < end:
            yield begin, first, end
        if end == count:
            return
        seen = end


def num_predicted(count: int, window: int, stride: int) -> int:
    """How many of `count` tokens `spans` predicts."""
    return sum(end - first for _, first, end in spans(count, window, stride))


def log_softmax(logits: Array) -> Array:
    """Log-probabilities of each row: float32 [rows, vocab]."""
    shifted = logits - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True, dtype=np.float64)).astype(
        np.float32
    )


def distributions(
    engine: LogitsEngine, token_ids: list[int], window: int, stride: int
) -> Iterator[tuple[NDArray[np.int64], Array]]:
    """The predicted tokens in order, at most ROWS at a time, with the log-probabilities of what
    could follow.

    Yields:
        ids [n] and natural logs [n, vocab].
    """
    for begin, first, end in spans(len(token_ids), window, stride):
        logits = engine.logits(token_ids[begin : end - 1])[first - 1 - begin :]
        targets = np.asarray(token_ids[first:end])
        for row in range(0, len(targets), ROWS):
            yield targets[row : row + ROWS], log_softmax(logits[row : row + ROWS])


def negative_log_likelihood(targets: NDArray[np.int64], log_probs: Array) -> float:
    """Nats, summed over the rows."""
    return -float(log_probs[np.arange(len(targets)), targets].sum(dtype=np.float64))


def kl_divergence(reference: Array, candidate: Array) -> NDArray[np.float64]:
    """KL(reference || candidate) = sum over tokens of p_ref (log p_ref - log p_cand), nats: [rows].

    Args:
        reference, candidate: log-probabilities [rows, vocab]; a token that the reference rules out
            counts nothing.
    """
    p = np.exp(reference)
    terms = np.multiply(p, reference - candidate, out=np.zeros_like(p), where=p > 0)
    return terms.sum(1, dtype=np.float64)


def identical_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens are the same before the first that differs."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def greedy(engine: BenchEngine, prompts: Sequence[list[int]], output_len: int) -> list[list[int]]:
    """Greedy continuations of `output_len` tokens each; the prompts run together, as the engine
    batches them."""
    params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
    outputs: dict[str, list[int]] = {f"quality-{i}": [] for i in range(len(prompts))}
    for name, prompt in zip(outputs, prompts, strict=True):
        engine.submit(name, list(prompt), params)
    unfinished = set(outputs)
    while unfinished:
        for output in engine.poll():
            outputs[output.request_id] += output.token_ids
            if output.error is not None:
                raise RuntimeError(output.error)
            if output.finish_reason is not None:
                unfinished.discard(output.request_id)
    return list(outputs.values())


def evaluate(
    engine: LogitsEngine,
    reference: Reference,
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> Quality:
    """Measure an engine at rest against the reference.

    Args:
        engine: the candidate, which serves no request.
        reference: of the same checkpoint.
        tick: called with how many tokens of how many are done.

    Returns:
        The figures; infinite or not a number where the engine's logits are.
    """
    stored = np.load(reference.folder / LOG_PROBS, mmap_mode="r")
    total = num_predicted(len(reference.token_ids), reference.window, reference.stride)
    nll, agreed, done = 0.0, 0, 0
    divergences: list[NDArray[np.float64]] = []
    for targets, log_probs in distributions(
        engine, reference.token_ids, reference.window, reference.stride
    ):
        nll += negative_log_likelihood(targets, log_probs)
        agreed += int((log_probs.argmax(1) == reference.top1[done : done + len(targets)]).sum())
        if known := len(rows := stored[done : done + len(targets)]):
            # Rounded to float16 they add up to a little more or less than 1: made a distribution
            # again.
            exact = log_softmax(rows.astype(np.float32))
            divergences.append(kl_divergence(exact, log_probs[:known]))
        done += len(targets)
        tick(done, total)
    outputs = greedy(engine, reference.prompts, len(reference.continuations[0]))
    prefixes = [
        identical_prefix(a, b) for a, b in zip(outputs, reference.continuations, strict=True)
    ]
    kl = np.concatenate(divergences)
    return Quality(
        perplexity=_exp(nll / total),
        bits_per_byte=bits_per_byte(nll / total, len(reference.token_ids), reference.num_bytes),
        tokens=total,
        kl_mean=float(kl.mean()),
        kl_p99=float(np.percentile(kl, 99)) if len(kl) >= LEAST_FOR_P99 else None,
        kl_tokens=len(kl),
        top1_agreement=agreed / total,
        prefix_mean=sum(prefixes) / len(prefixes),
        prefix_min=min(prefixes),
        prefix_of=len(reference.continuations[0]),
        prompts=len(prefixes),
        reference=reference.precision,
        reference_id=reference.id,
        reference_perplexity=reference.perplexity,
    )


def bits_per_byte(nats_per_token: float, num_tokens: int, num_bytes: int | None) -> float | None:
    """Bits a byte of text: comparable across tokenizers, which perplexity is not; None without
    bytes."""
    return nats_per_token / math.log(2) * num_tokens / num_bytes if num_bytes else None


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf
