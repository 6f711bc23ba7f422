"""What the scheduler costs: planning a step by how many requests run, and by how many wait.

    python scripts/planning_cost.py --output reports/examples/cpu/planning_cost.json

The engine's own scheduler and block pool, without a model: each step is planned and timed, then
every request in it gets its token. Only the planning is timed.

1. By requests running: a full batch decodes, nobody waits.
2. By requests waiting: a full batch of `BATCH` decodes, and so many more wait behind it.
3. A whole life: so many requests come at once and are served `BATCH` at a time to their end; the
   time of all planning, over the requests.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

from program import CPU, exit_code, finish, new_parser

from minivllm.cache.manager import CacheManager
from minivllm.cache.spec import CacheLayout
from minivllm.engine.batching import Continuous
from minivllm.engine.events import EventBus
from minivllm.engine.options import SamplingParams
from minivllm.engine.request import Request
from minivllm.engine.scheduler import Scheduler

RUNNING = (1, 16, 64, 256, 1024)
WAITING = (1, 10, 100, 1_000, 10_000)
BATCH = 64
BLOCK_SIZE = 16
PROMPT = 16  # tokens at least
OUTPUT = 64  # tokens, in the third part
PARAMS = SamplingParams(ignore_eos=True)


class Model:
    """A scheduler whose steps take no time.

    Args:
        batch: most requests that run at once.
        longest: tokens of the longest request, up to a block more or less.
    """

    def __init__(self, batch: int, longest: int) -> None:
        blocks = 1 + (batch + 1) * (longest // BLOCK_SIZE + 3)  # room for all: nobody is preempted
        cache = CacheManager(CacheLayout(BLOCK_SIZE, blocks))
        self.scheduler = Scheduler(
            Continuous(batch, max_num_batched_tokens=16_384), cache, EventBus()
        )
        self._num_added = 0

    def add(self, count: int, output: int) -> None:
        """Add requests to the scheduler."""
        for _ in range(count):
            self._num_added += 1
            # or all would need a block in the same step
            prompt = PROMPT + self._num_added % BLOCK_SIZE
            request = Request(
                f"r{self._num_added}",
                [1] * prompt,
                PARAMS,
                max_num_tokens=prompt + output,
                seed=0,
                arrival_s=self.scheduler.now(),
            )
            self.scheduler.add(request)

    def step(self) -> float:
        """Plan and run a step; returns the seconds of planning."""
        begin = time.perf_counter()
        plan = self.scheduler.plan()
        seconds = time.perf_counter() - begin
        for part in plan.scheduled:
            self.scheduler.computed(part)
            if part.samples and (reason := part.request.append(1)) is not None:
                self.scheduler.finish(part.request, reason)
        return seconds


def decoding(running: int, waiting: int, steps: int) -> dict[str, float]:
    """Milliseconds to plan a step in which a full batch decodes, over so many steps.

    Args:
        running: requests in the batch.
        waiting: requests behind it.
        steps: to time.
    """
    model = Model(running, PROMPT + 2 * steps)
    model.add(running, 2 * steps)
    while len(model.scheduler.running) < running:
        model.step()
    model.add(waiting, 2 * steps)
    times = [1e3 * model.step() for _ in range(steps)]
    assert len(model.scheduler.running) == running and len(model.scheduler.waiting) == waiting
    cuts = statistics.quantiles(times, n=100)
    percentiles = {f"p{percent}_ms": cuts[percent - 1] for percent in (50, 90, 99)}
    return {"running": running, "waiting": waiting, "steps": steps, **percentiles}


def life(requests: int) -> dict[str, float]:
    """Microseconds of planning for each request, from its coming to its end, where so many come at
    once."""
    model = Model(BATCH, PROMPT + OUTPUT)
    model.add(requests, OUTPUT)
    seconds = 0.0
    while model.scheduler.has_unfinished:
        seconds += model.step()
    return {"requests": requests, "us_a_request": 1e6 * seconds / requests}


def main() -> None:
    """Entry point; see the module's docstring."""
    parser = new_parser(__doc__, default=CPU / "planning_cost.json")
    parser.add_argument("--steps", type=int, default=500, help="steps timed for each figure")
    args = parser.parse_args()
    figures: dict[str, Any] = {
        "what": "planning a step: the scheduler and the block pool, no model",
        "by_running": [decoding(running, 0, args.steps) for running in RUNNING],
        "by_waiting": [decoding(BATCH, waiting, args.steps) for waiting in WAITING],
        "whole_life": [life(requests) for requests in (BATCH, *WAITING[2:])],
    }
    finish(args.output, figures, "planning_cost.py")


if __name__ == "__main__":
    sys.exit(exit_code(main))
