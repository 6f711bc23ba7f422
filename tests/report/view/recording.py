"""Recordings of imaginary engines, whose steps take time: what the page and the account read."""

from __future__ import annotations

import random
from typing import Any

from minivllm.cache.spec import CacheLayout
from minivllm.engine.batching import BatchingPolicy, Continuous
from minivllm.engine.request import Request
from minivllm.engine.step import StepPlan
from tests.engine.imaginary import Machine

TOKEN_S, STEP_S = 5e-5, 4e-3  # of a step: for each token, and beside

ENGINE = {  # what a bundle with the whole state says of the engine
    "version": 1,
    "block_size": 4,
    "num_blocks": 8,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "batching": "continuous",
    "preemption": "recompute",
}


START: dict[str, Any] = {"time_s": 0.0, "end_s": 0.0, "engine": ENGINE}


def step(number: int, time_s: float, end_s: float, **changes: Any) -> dict[str, Any]:
    """A bundle of one step."""
    return {"step": number, "time_s": time_s, "end_s": end_s, **changes}


def named(number: int, arrival_s: float, parent: int | None = None) -> list[Any]:
    """A request with a prompt of 6 tokens, named for the first time."""
    return [number, f"r{number}", 6, 10, 0, arrival_s, parent]


def states(*changes: tuple[int, str]) -> list[list[Any]]:
    """State changes whose times do not count."""
    return [[0.0, number, state, None] for number, state in changes]


class Timed(Machine):
    """A machine whose steps take as long as they have tokens."""

    def carry_out(self, plan: StepPlan) -> list[Request]:
        if plan.scheduled:
            self.clock.time_s += STEP_S + TOKEN_S * plan.num_tokens
        return super().carry_out(plan)


def record(
    policy: BatchingPolicy | None = None,
    num_requests: int = 24,
    blocks: int = 40,
    mean_gap_s: float = 0.03,
    most: int = 64,
    seed: int = 0,
    samples: int = 1,
    retold_every: int = 0,
    **layout: object,
) -> list[dict[str, Any]]:
    """Items of a run in which requests wait, share prefixes and are preempted, as JSON gives them
    back.

    Args:
        policy: of the batches; a continuous one unless it is given.
        num_requests: in all.
        blocks: of the cache, four tokens each.
        mean_gap_s: between two arrivals.
        most: tokens of a prompt, and of an output.
        seed: of lengths and arrivals.
        samples: of every seventh request.
        retold_every: steps, after which the whole state is told again; 0 never.
        layout: further options of `CacheLayout`.
    """
    policy = policy or Continuous(8, 48, watermark=0.05)
    kept = {"prefix_caching": True, **layout}
    machine = Timed(policy, CacheLayout(4, blocks + 1, **kept))  # type: ignore[arg-type]
    items: list[dict[str, Any]] = machine.recorded()
    rng = random.Random(seed)
    due, steps, arrivals = 0.0, 0, list[float]()
    for _ in range(num_requests):
        due += rng.expovariate(1 / mean_gap_s)
        arrivals.append(due)
    while arrivals or machine.scheduler.has_unfinished:
        if not machine.scheduler.has_unfinished:
            machine.clock.time_s = max(machine.clock.time_s, arrivals[0])
        while arrivals and arrivals[0] <= machine.clock.time_s:
            shared = [7] * rng.choice([0, 8, 16])
            prompt = [*shared, *(rng.randrange(5) for _ in range(rng.randint(4, most)))]
            count = samples if len(machine.requests) % 7 == 6 else 1
            request = machine.request(prompt, rng.randint(4, most), count, arrivals.pop(0))
            machine.scheduler.add(request)
            machine.requests += [request, *request.unstarted]
        machine.step()
        steps += 1
        if retold_every and steps % retold_every == 0:
            machine.observer.tell_all()
        machine.observer.flush()
        last = items[-1]
        gauges = {"time_s": last["end_s"], "memory_bytes": 2**30 + 1024 * last["num_used_blocks"]}
        items.append({"gauges": gauges})
    return items


def recorded_slowly(machine: Machine) -> list[Any]:
    """The items of a machine from now on, whose steps take a quarter of a second each."""
    carry_out = machine.carry_out

    def slowly(plan: StepPlan) -> list[Request]:
        machine.clock.time_s += 0.25
        return carry_out(plan)

    machine.carry_out = slowly  # type: ignore[method-assign]
    return machine.recorded()
