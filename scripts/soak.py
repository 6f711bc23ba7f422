"""A soak in simulation: bursts of more traffic than the engine can take, with cancellations,
deadlines and preemptions.

    python scripts/soak.py --output reports/examples/cpu/soak.json
    python scripts/soak.py --hours 1 batching=sequential

The scheduler and the block pool are the real ones; their invariants are checked every few steps. A
burst is ten virtual minutes of arrivals at 1.5 times the capacity, and then time until everyone has
an answer; bursts follow each other for a virtual day. Further arguments are overrides of the
configuration, on top of DEFAULTS.
"""

from __future__ import annotations

import heapq
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from program import exit_code, new_parser, write_record

from minivllm.bench.records.identity import code_hash
from minivllm.bench.workloads.lazy_prompt import LazyPrompt
from minivllm.config.compose import build, compose
from minivllm.engine.options import SamplingParams
from minivllm.engines.simulated.engine import SimulatedEngine

# The embedded model on a machine so slow that a few requests a second fill it, with too little
# cache for the batch.
DEFAULTS = (
    *("engine=simulated", "engine.bandwidth_gb_s=10", "engine.tflops=0.5", "engine.overhead_ms=50"),
    *("batching.max_num_batched_tokens=1024", "engine.memory_gb=0.085"),
)
INPUT_LEN, OUTPUT_LEN = (16, 800), (4, 200)
FAMILIES = 8  # of prompts that begin alike
CAPACITY_REQUESTS = 200
BURST_S = 600.0
PRIORITIES = (-1, 0, 0, 0, 1)
WITH_DEADLINE, DEADLINE_MS = 0.3, (5_000.0, 120_000.0)
CANCELLED = 0.1  # of the requests, waiting and running ones
PATIENCE_S = 20.0  # mean time before somebody cancels


def make_engine(overrides: Sequence[str] = ()) -> SimulatedEngine:
    """The engine of DEFAULTS and further overrides."""
    config = compose([*DEFAULTS, *overrides])
    engine: SimulatedEngine = build(config["engine"], config=config)
    return engine


def draw(rng: random.Random, request_id: str, engine: SimulatedEngine) -> None:
    """Submit a request of random lengths."""
    params = SamplingParams(
        max_tokens=rng.randint(*OUTPUT_LEN),
        ignore_eos=True,
        priority=rng.choice(PRIORITIES),
        deadline_ms=rng.uniform(*DEADLINE_MS) if rng.random() < WITH_DEADLINE else None,
    )
    start = rng.randrange(FAMILIES) << 32
    prompt = LazyPrompt((range(start, start + rng.randint(*INPUT_LEN)),), engine.info.vocab_size, 0)
    engine.submit(request_id, prompt, params)


def capacity(engine: SimulatedEngine) -> float:
    """Requests a second that the engine serves when there is always one waiting."""
    rng = random.Random(1)
    start = engine.clock.now()
    for i in range(CAPACITY_REQUESTS):
        draw(rng, f"capacity-{i}", engine)
    while engine.scheduler.has_unfinished:
        engine.poll()
    rate = CAPACITY_REQUESTS / (engine.clock.now() - start)
    engine.reset()
    return rate


def check(engine: SimulatedEngine) -> None:
    """Assert the invariants between two steps."""
    scheduler = engine.scheduler
    requests = [*scheduler.running, *scheduler.waiting]
    engine.cache.pool.check_integrity([request.cache.block_table for request in requests])
    assert len({request.request_id for request in requests}) == len(requests), (
        "a request is in two places"
    )
    for request in requests:
        room = (
            max(len(request.cache.block_table.blocks), len(request.cache.host_slots))
            * engine.cache.layout.block_size
        )
        assert request.num_computed_tokens <= room, (
            f"{request.request_id} has tokens without blocks"
        )


@contextmanager
def watched(engine: SimulatedEngine) -> Iterator[None]:
    """Assert that every step is within its budgets."""
    times, policy = engine.step_times, engine.scheduler.policy

    def watch(requests: int, tokens: int, prefill: int, *others: Any) -> float:
        assert requests <= policy.max_num_seqs, "more run than may"
        assert prefill <= tokens <= policy.max_num_batched_tokens, "a step is above its budget"
        return times(requests, tokens, prefill, *others)

    engine.step_times = watch
    try:
        yield
    finally:
        engine.step_times = times


def soak(
    engine: SimulatedEngine,
    seconds: float = BURST_S,
    load: float = 1.5,
    check_every: int = 100,
    seed: int = 0,
) -> dict[str, Any]:
    """Send Poisson arrivals for a number of virtual seconds, then wait until all have ended.

    Args:
        engine: nothing may run on it.
        seconds: of arrivals, on the engine's clock.
        load: arrivals, as a multiple of the engine's capacity.
        check_every: steps between two checks of the invariants.
        seed: of arrivals, lengths and cancellations.

    Returns:
        What happened, as plain data.

    Raises:
        AssertionError: an invariant is broken, or a request never ended.
    """
    rate = load * capacity(engine)
    with watched(engine):
        return _soak(engine, seconds, rate, check_every, seed)


def _soak(
    engine: SimulatedEngine, seconds: float, rate: float, check_every: int, seed: int
) -> dict[str, Any]:
    rng = random.Random(seed)
    clock, begin = engine.clock, engine.clock.now()
    due, number, steps = begin + rng.expovariate(rate), 0, 0
    arrived: dict[str, float] = {}  # of the requests that are not over
    cancels: list[tuple[float, str]] = []
    ended: Counter[str] = Counter()
    longest, most = 0.0, 0
    while due < begin + seconds or arrived:
        now = clock.now()
        while due < begin + seconds and due <= now:
            draw(rng, f"r{number}", engine)
            arrived[f"r{number}"] = due
            if rng.random() < CANCELLED:
                heapq.heappush(cancels, (due + rng.expovariate(1 / PATIENCE_S), f"r{number}"))
            number += 1
            due += rng.expovariate(rate)
        while cancels and cancels[0][0] <= now:
            request_id = heapq.heappop(cancels)[1]
            if arrived.pop(request_id, None) is not None:
                engine.abort(request_id)
                ended["cancelled"] += 1
        most = max(most, len(arrived))
        if not arrived:
            clock.sleep(due - now)
            continue
        for output in engine.poll():
            if output.finish_reason is not None:
                longest = max(longest, clock.now() - arrived.pop(output.request_id))
                ended[output.finish_reason] += 1
        steps += 1
        if steps % check_every == 0:
            check(engine)
        assert clock.now() < begin + 10 * seconds + 3600, f"{len(arrived)} requests do not end"
    check(engine)
    assert engine.cache.pool.num_used == 0, "blocks have leaked"
    assert engine.cache.swap.num_free == engine.cache.layout.host_slots, "host slots have leaked"
    assert not engine.scheduler.has_unfinished, "the scheduler holds requests that are over"
    return {
        "virtual_s": clock.now() - begin,
        "arrivals_s": seconds,
        "arrivals_a_s": rate,
        "requests": number,
        "ended": dict(sorted(ended.items())),
        "steps": steps,
        "checks": steps // check_every + 1,
        "most_in_the_system": most,
        "longest_e2e_s": longest,
        "counters": engine.liveness(),
    }


def main() -> None:
    """Entry point; see the module's docstring."""
    parser = new_parser(__doc__, help="where to keep the record, as JSON")
    parser.add_argument("--hours", type=float, default=24.0, help="virtual hours of arrivals")
    parser.add_argument(
        "--load", type=float, default=1.5, help="arrivals, as a multiple of the capacity"
    )
    parser.add_argument("overrides", nargs="*", help="of the configuration")
    args = parser.parse_args()
    start = time.perf_counter()
    engine = make_engine(args.overrides)
    bursts: list[dict[str, Any]] = []
    while sum(burst["virtual_s"] for burst in bursts) < 3600 * args.hours:
        bursts.append(soak(engine, load=args.load, seed=len(bursts)))
        print(
            f"{len(bursts)} bursts, {sum(b['virtual_s'] for b in bursts) / 3600:.1f} h",
            file=sys.stderr,
        )
    found = {
        "overrides": [*DEFAULTS, *args.overrides],
        "load": args.load,
        "virtual_hours": sum(burst["virtual_s"] for burst in bursts) / 3600,
        "bursts": len(bursts),
        **{name: sum(burst[name] for burst in bursts) for name in ("requests", "steps", "checks")},
        "ended": dict(sum((Counter(burst["ended"]) for burst in bursts), Counter())),
        "preemptions": sum(burst["counters"]["batching"]["preemptions"] for burst in bursts),
        **{
            name: max(burst[name] for burst in bursts)
            for name in ("most_in_the_system", "longest_e2e_s")
        },
        "wall_s": time.perf_counter() - start,
        "code_hash": code_hash(),
    }
    print(json.dumps(found, indent=1))
    write_record(args.output, found)


if __name__ == "__main__":
    sys.exit(exit_code(main))
