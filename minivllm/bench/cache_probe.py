"""Whether a server keeps prompts that it has seen, although it reports no token that it found."""

from __future__ import annotations

import secrets
from statistics import median

import numpy as np

from minivllm.bench.driver import drive
from minivllm.bench.hardware.clock import Clock, ClockProtocol
from minivllm.bench.metrics.request_trace import RequestTrace
from minivllm.bench.workloads.arrivals import Concurrency
from minivllm.bench.workloads.lazy_prompt import draw_ids
from minivllm.bench.workloads.workload import Workload, WorkloadRequest
from minivllm.engine.options import SamplingParams
from minivllm.engines.base import BenchEngine
from minivllm.models.load.reserved_ids import reserved_ids

PAIRS = 4  # prompts that are sent twice; the first pair that shows nothing is the last
PROMPT_TOKENS = 256  # at most
FASTER = 0.5  # of the time of a new prompt, which one that was kept takes at most
LEAST_S = 0.002  # by which it must be faster


def undeclared_cache(engine: BenchEngine, clock: ClockProtocol | None = None) -> list[str]:
    """A note where prompts are answered much faster the second time, and the engine does not say
    that it found them.

    Args:
        engine: at rest; one whose prefix cache `reset` cannot empty is probed, then reset.
        clock: of all times; None: the machine's.
    """
    if not engine.info.keeps_prefixes:
        return []
    times: list[tuple[float, float]] = []
    try:
        _ask(engine, clock, "first")  # which may wait for what a server does once
        for number in range(PAIRS):
            new, known = (_ask(engine, clock, f"{number}") for _ in range(2))
            first_s, second_s = (_seconds(trace) for trace in (new, known))
            if known.cached_tokens or first_s is None or second_s is None:
                return []
            if second_s > FASTER * first_s or first_s - second_s < LEAST_S:
                return []
            times.append((first_s, second_s))
    finally:
        engine.reset()
    new_ms, known_ms = (1e3 * median(each) for each in zip(*times, strict=True))
    return [
        f"the server answers a prompt that it has had before in {known_ms:.1f} ms and a new one in "
        f"{new_ms:.1f} ms, and reports no token that it found: it keeps prompts or answers, so "
        "that prompts which share a beginning, with each other or with earlier measurements, are "
        "not computed whole"
    ]


def _ask(engine: BenchEngine, clock: ClockProtocol | None, name: str) -> RequestTrace:
    """The trace of a request for one token, with a prompt that depends on its name and is new to
    any server."""
    info = engine.info
    tokenizer = getattr(engine, "tokenizer", None)
    reserved = reserved_ids(tokenizer, info.eos_token_ids, info.vocab_size)
    length = max(1, min(PROMPT_TOKENS, info.max_model_len // 4))
    rng = np.random.default_rng([_SESSION, *name.encode()])
    prompt = draw_ids(length, info.vocab_size, reserved, rng)
    request = WorkloadRequest(f"cache-{name}", prompt, 1, False)
    params = SamplingParams(temperature=0.0)
    (trace,) = drive(engine, Workload((request,)), Concurrency(1), params, clock or Clock())
    return trace


_SESSION = secrets.randbits(64)


def _seconds(trace: RequestTrace) -> float | None:
    """From when it was sent to its token; None where it failed."""
    if not trace.completed or trace.submitted_s is None:
        return None
    return trace.token_times[0] - trace.submitted_s
