"""What measuring costs the measured process: counts times cost per event, and on against off.

    python scripts/harness_overhead.py --output reports/examples/cpu/harness_overhead.json

On the embedded model at batch 1, the worst case here: its steps are the shortest, so events weigh
most.

1. Counts times cost: the events, step records and token stamps of one run are counted, and each is
   timed by itself over many repetitions.
2. On against off: the same requests with the driver, the adapter and its listener, and by a bare
   loop over `Engine.step` with nobody listening, in alternation; the median of the ratios.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from program import CPU, exit_code, finish, new_parser

from minivllm.assembly import build_engine
from minivllm.bench.driver import drive
from minivllm.bench.hardware.clock import Clock
from minivllm.bench.workloads.arrivals import Offline
from minivllm.bench.workloads.workload import Workload
from minivllm.config.compose import build, compose
from minivllm.engine.engine import Engine
from minivllm.engine.events import EventBus, StepTimed
from minivllm.engine.options import SamplingParams
from minivllm.engines.base import BenchEngine, EngineOutput
from minivllm.engines.minivllm.engine import MinivllmEngine


class Instant:
    """An engine that answers at once, one token a request and poll, so that only the driver
    costs."""

    def __init__(self, info: Any) -> None:
        self.info = info
        self._left: dict[str, int] = {}

    def submit(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        self._left[request_id] = params.max_tokens or 1

    def poll(self, timeout_s: float | None = None) -> list[EngineOutput]:
        outputs = []
        for request_id in list(self._left):
            self._left[request_id] -= 1
            done = self._left[request_id] == 0
            outputs.append(EngineOutput(request_id, (1,), "length" if done else None))
            if done:
                del self._left[request_id]
        return outputs


def seconds(action: Callable[[], object]) -> float:
    """Wall time of one call."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def per_call(action: Callable[[], object], repetitions: int = 20_000) -> float:
    """Seconds of a call: the least of five rounds, since noise only adds time."""
    return (
        min(seconds(lambda: [action() for _ in range(repetitions)]) for _ in range(5)) / repetitions
    )


def event_cost() -> float:
    """Seconds to build and deliver the event of a step that the harness listens to."""
    bus = EventBus()
    events: deque[StepTimed] = deque(maxlen=1000)
    bus.subscribe(events.append, StepTimed)
    timed: list[Any] = [1] * len(StepTimed._fields)
    return per_call(lambda: bus.emit(StepTimed(*timed)))


def run_bare(engine: Engine, workload: Workload, params: SamplingParams) -> None:
    """Seconds of the same requests without the harness."""
    for request in workload.requests:
        own = replace(params, max_tokens=request.max_tokens, ignore_eos=request.ignore_eos)
        engine.add_request(
            request.request_id, list(request.prompt_token_ids), own, detokenize=False
        )
    while engine.has_unfinished:
        engine.step()


def main() -> None:
    parser = new_parser(__doc__, default=CPU / "harness_overhead.json")
    parser.add_argument(
        "--pairs", type=int, default=15, help="pairs of runs with and without measuring"
    )
    args = parser.parse_args()
    overrides = ("batching=sequential", "workload.num_requests=4", "workload.output_len=128")
    config = compose([*overrides])
    engine, bare = MinivllmEngine(config), build_engine(config)
    workload = build(config["workload"]).generate(
        engine.encode, engine.info.vocab_size, engine.info.max_model_len, 0
    )
    params = build(config["decoding"])

    def on() -> None:
        engine.reset()
        drive(engine, workload, Offline(), params, Clock())

    def off() -> None:
        run_bare(bare, workload, params)

    on()
    off()
    # Which of a pair goes first alternates, so that a drifting machine favours neither.
    pairs = []
    for index in range(args.pairs):
        first, second = (on, off) if index % 2 else (off, on)
        one, other = seconds(first), seconds(second)
        pairs.append((one, other) if index % 2 else (other, one))
    on()
    steps = engine.steps()
    tokens = sum(request.max_tokens for request in workload.requests)
    instant: BenchEngine = Instant(engine.info)  # type: ignore[assignment]  # steps and text are not asked for
    driver_s = min(
        seconds(lambda: drive(instant, workload, Offline(), params, Clock())) for _ in range(5)
    )
    events_s = event_cost() * len(steps)
    window_s = statistics.median(pair[0] for pair in pairs)
    engine.reset()
    ratios = [with_s / without_s for with_s, without_s in pairs]
    figures = {
        "what": "cost of measuring in the measured process, embedded model, batch 1",
        "steps": len(steps),
        "tokens": tokens,
        "window_s": window_s,
        "events_us_per_step": 1e6 * events_s / len(steps),
        "driver_us_per_token": 1e6 * driver_s / tokens,
        "share_by_counts": (events_s + driver_s) / window_s,
        "on_over_off": {
            "median": statistics.median(ratios),
            "quartiles": statistics.quantiles(ratios, n=4),
            "pairs": len(ratios),
        },
    }
    finish(args.output, figures, "harness_overhead.py", *overrides)


if __name__ == "__main__":
    sys.exit(exit_code(main))
