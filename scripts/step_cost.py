"""What a step of the engine costs in one checkout of this project and in another, in turns.

    git worktree add build/before COMMIT
    python scripts/step_cost.py build/before . --output reports/examples/cpu/step_cost.json

A block is one process for each checkout, and the two take turns, a round of some steps at a time,
so that what changes on the machine meets both. A round's figure is the processor time of one
thread, since other work on the machine adds less to processor time than to wall time:

- planning: `Scheduler.plan` with 1, 64 and 256 running requests;
- a step that decodes: the embedded model with 1 and 32 requests, where everything that is not the
  model weighs most, and the shape of Qwen3-0.6B with random weights, also with 1 and 32.

A block's ratio is the median over its pairs of rounds. The ratio of a figure is the pseudomedian
over blocks with its confidence interval, beside the smallest effect that the blocks would have
found (the method of `task=compare`).
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from program import compared as ratio
from program import exit_code, new_parser, write_figures

PAIRS = {"tiny": 20, "qwen3": 12}  # rounds of each checkout in a block
STEPS = {"tiny": 40, "qwen3": 8}  # of a round
WARM_UP = 3  # steps before a round
PROBE = "--probe"  # starts the program as a process of a checkout
PLANNED = (1, 64, 256)  # running requests
BATCHES = (1, 32)
PROMPT = [5, 6, 7]


def engine(model: str, requests: int) -> Any:
    """An LLM with room for this number of requests, built with the API that all checkouts share."""
    from minivllm import LLM

    overrides = [
        "runtime.device=cpu",
        "runtime.threads=1",
        f"batching.max_num_seqs={requests}",
        f"cache.num_blocks={requests * 16 + 1}",
        "cache.block_size=16",
        "cache.prefix_caching=false",
        *(["model.weights=random"] if model != "tiny" else []),
    ]
    return LLM(model, quant="bf16", overrides=overrides)


def admit(llm: Any, requests: int, steps: int) -> None:
    """Add requests that decode for so many steps, and compute their prompts."""
    from minivllm import SamplingParams

    params = SamplingParams(max_tokens=2 * (steps + WARM_UP), ignore_eos=True)
    for index in range(requests):
        llm.engine.add_request(str(index), [*PROMPT, index], params, detokenize=False)
    for _ in range(WARM_UP):
        llm.engine.step()


def step_us(llm: Any, requests: int, steps: int) -> float:
    """Microseconds of processor time that a decoding step takes."""
    admit(llm, requests, steps)
    begin = time.process_time()
    for _ in range(steps):
        llm.engine.step()
    seconds = time.process_time() - begin
    llm.engine.abort_all()
    return 1e6 * seconds / steps


def plan_us(llm: Any, requests: int, steps: int) -> float:
    """Microseconds of processor time that planning a decoding step takes."""
    admit(llm, requests, steps)
    scheduler, spent = llm.engine.scheduler, 0.0
    plan = scheduler.plan

    def timed() -> Any:
        nonlocal spent
        begin = time.process_time()
        planned = plan()
        spent += time.process_time() - begin
        return planned

    scheduler.plan = timed
    for _ in range(steps):
        llm.engine.step()
    del scheduler.plan
    llm.engine.abort_all()
    return 1e6 * spent / steps


def figures(models: Sequence[str]) -> list[tuple[str, str, int]]:
    """What is measured: the kind of figure, the model, and how many requests run."""
    return [
        *(("planning", "tiny", count) for count in PLANNED if "tiny" in models),
        *(("step", model, count) for model in models for count in BATCHES),
    ]


def probe() -> None:
    """Answer each line of standard input, a kind, a model and a number of requests, with the
    microseconds of one round of the checkout that this process imports."""
    measure = {"planning": plan_us, "step": step_us}
    llm, loaded = None, None
    for line in sys.stdin:
        kind, model, requests = line.split()
        if loaded != (model, requests):
            if llm is not None:
                llm.close()
            llm, loaded = engine(model, int(requests)), (model, requests)
        print(json.dumps(measure[kind](llm, int(requests), STEPS[model])), flush=True)


class Checkout:
    """A process on a checkout that measures a round whenever it is asked.

    Args:
        path: of the checkout.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        paths = [str(path.resolve()), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, __file__, PROBE],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def round_us(self, figure: tuple[str, str, int]) -> float:
        """Microseconds of a round.

        Raises:
            SystemExit: the process failed; its error is on the terminal.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            print(*figure, file=stdin, flush=True)
            return float(json.loads(stdout.readline()))
        except (OSError, ValueError):
            raise SystemExit(f"{self.path}: the probe failed") from None

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def block(
    before: Path, after: Path, measured: Sequence[tuple[str, str, int]]
) -> list[dict[str, float]]:
    """Each figure of both checkouts by new processes, whose rounds alternate."""
    rows, pair = [], (Checkout(before), Checkout(after))
    try:
        for figure in measured:
            for checkout in pair:  # the first round loads the model
                checkout.round_us(figure)
            rounds: tuple[list[float], list[float]] = ([], [])
            for index in range(PAIRS[figure[1]]):
                for side in (0, 1) if index % 2 == 0 else (1, 0):
                    rounds[side].append(pair[side].round_us(figure))
            logs = [math.log(b / a) for a, b in zip(*rounds, strict=True)]
            rows.append(
                {
                    "before_us": statistics.median(rounds[0]),
                    "after_us": statistics.median(rounds[1]),
                    "log_ratio": statistics.median(logs),
                }
            )
    finally:
        for checkout in pair:
            checkout.close()
    return rows


def compared(
    measured: Sequence[tuple[str, str, int]], blocks: Sequence[Sequence[dict[str, float]]]
) -> list[dict[str, Any]]:
    """For each figure the microseconds of both checkouts and the second's over the first's."""
    rows = []
    for index, (kind, model, requests) in enumerate(measured):
        of_figure = [one[index] for one in blocks]
        logs = [row["log_ratio"] for row in of_figure]
        name = kind if kind == "planning" else f"step of {model}"
        rows.append(
            {
                "figure": f"{name}, {requests} running",
                "before_us": statistics.median(row["before_us"] for row in of_figure),
                "after_us": statistics.median(row["after_us"] for row in of_figure),
                **ratio(logs),
            }
        )
    return rows


def main() -> None:
    """Entry point; see the module's docstring."""
    parser = new_parser(__doc__, help="also write the figures to this file")
    parser.add_argument("before", type=Path, help="a checkout of the project")
    parser.add_argument("after", type=Path, nargs="?", default=Path("."), help="another one")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--models", nargs="+", choices=sorted(STEPS), default=list(STEPS))
    args = parser.parse_args()
    if not (args.before / "minivllm").is_dir():
        parser.error("BEFORE must be a checkout of this project, such as a git worktree")

    measured, blocks = figures(args.models), []
    for index in range(args.blocks):
        blocks.append(block(args.before, args.after, measured))
        print(f"block {index + 1} of {args.blocks}", file=sys.stderr)
    found = {
        "what": "processor time of a step in two checkouts, measured in turns",
        "commits": [
            subprocess.run(
                ["git", "-C", str(tree), "rev-parse", "HEAD"], capture_output=True, text=True
            ).stdout.strip()
            for tree in (args.before, args.after)
        ],
        "figures": compared(measured, blocks),
        "blocks": blocks,
    }
    write_figures(args.output, found, command="step_cost.py build/before .")
    print(json.dumps({name: found[name] for name in ("commits", "figures")}, indent=1))


if __name__ == "__main__":
    if sys.argv[1:] == [PROBE]:  # imports only what every checkout has
        probe()
    else:
        sys.exit(exit_code(main))
