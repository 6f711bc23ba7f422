"""What a step of the engine costs in one checkout of this project and in another, in turns.

    git worktree add build/before COMMIT
    python scripts/step_cost.py build/before . --output reports/examples/cpu/step_cost.json

A block is one process for each checkout, and which of the two goes first alternates. A process
measures the processor time of one thread, since other work on the machine adds less to processor
time than to wall time, and keeps the shortest of several rounds:

- planning: `Scheduler.plan` with 1, 64 and 256 running requests;
- a step that decodes: the embedded model with 1 and 32 requests, where everything that is not the
  model weighs most, and the shape of Qwen3-0.6B with random weights, also with 1 and 32.

The ratio of each figure is the pseudomedian over blocks with its confidence interval, beside the
smallest effect that the blocks would have found (the method of `task=compare`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROUNDS = {"tiny": 7, "qwen3": 3}
STEPS = {"tiny": 40, "qwen3": 8}  # of a round
WARM_UP = 3  # steps before a round
PLANNED = (1, 64, 256)  # running requests
BATCHES = (1, 32)
PROMPT = [5, 6, 7]
TIMEOUT_S = 1800.0  # of one process


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


def probe(models: list[str]) -> dict[str, float]:
    """The times of the checkout that this process imports, in microseconds."""
    result = {}
    for model in models:
        steps = STEPS[model]
        if model == "tiny":
            for requests in PLANNED:
                with engine(model, requests) as llm:
                    result[f"planning, {requests} running"] = min(
                        plan_us(llm, requests, steps) for _ in range(ROUNDS[model])
                    )
        for requests in BATCHES:
            with engine(model, requests) as llm:
                result[f"step of {model}, {requests} running"] = min(
                    step_us(llm, requests, steps) for _ in range(ROUNDS[model])
                )
    return result


def measured(checkout: Path, models: list[str]) -> dict[str, float]:
    """Run the probe in a process of its own on a checkout.

    Raises:
        SystemExit: the process failed; its last lines are shown.
    """
    paths = [str(checkout.resolve()), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, __file__, "--probe", "--models", *models],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if done.returncode:
        raise SystemExit(f"{checkout}: the probe failed:\n{done.stderr[-2000:]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def compared(blocks: list[tuple[dict[str, float], dict[str, float]]]) -> list[dict[str, Any]]:
    """For each figure the microseconds of both checkouts and the second's over the first's."""
    from minivllm.analysis.statistics import minimum_detectable, paired

    rows = []
    for name in blocks[0][0]:
        logs = [math.log(after[name] / before[name]) for before, after in blocks]
        rows.append(
            {
                "figure": name,
                "before_us": min(before[name] for before, _ in blocks),
                "after_us": min(after[name] for _, after in blocks),
                **asdict(paired(logs)),
                "found_from": minimum_detectable(logs, tests=1),
            }
        )
    return rows


def main() -> None:
    """Entry point; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, nargs="?", help="a checkout of the project")
    parser.add_argument("after", type=Path, nargs="?", default=Path("."), help="another one")
    parser.add_argument("--output", type=Path, help="also write the figures to this file")
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--models", nargs="+", choices=sorted(STEPS), default=list(STEPS))
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.probe:
        print(json.dumps(probe(args.models)))
        return
    if args.before is None or not (args.before / "minivllm").is_dir():
        parser.error("BEFORE must be a checkout of this project, such as a git worktree")

    from minivllm.bench.records.identity import code_hash
    from minivllm.bench.records.provenance import provenance
    from minivllm.config.compose import compose
    from minivllm.platform import files

    blocks = []
    for index in range(args.blocks):
        order = [args.before, args.after] if index % 2 == 0 else [args.after, args.before]
        figures = {tree: measured(tree, args.models) for tree in order}
        blocks.append((figures[args.before], figures[args.after]))
        print(f"block {index + 1} of {args.blocks}", file=sys.stderr)
    result = {
        "what": "processor time of a step in two checkouts, measured in turns",
        "commits": [
            subprocess.run(
                ["git", "-C", str(tree), "rev-parse", "HEAD"], capture_output=True, text=True
            ).stdout.strip()
            for tree in (args.before, args.after)
        ],
        "figures": compared(blocks),
        "blocks": blocks,
        "provenance": provenance(compose([]), code_hash()),
        "command": "python scripts/step_cost.py build/before .",
    }
    if args.output is not None:
        files.write_json(args.output, result)
    print(json.dumps({k: v for k, v in result.items() if k in ("commits", "figures")}, indent=1))


if __name__ == "__main__":
    main()
