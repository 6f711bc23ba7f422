"""What the way over HTTP costs: the engine behind its own server, and the same engine in process.

    python scripts/serving_overhead.py --output reports/examples/cpu/serving_overhead.json

Both arms are measured by the harness with the same requests, in turns: `engine=minivllm` in
process, and `engine=openai` in front of `preset=serve`, which stays up and sleeps while the other
arm runs. The engine has core 0 and one thread in both; HTTP and the client share core 1.

- throughput with 32 streams: server / in process, of output tokens per second;
- TTFT of one request at a time (p50), in milliseconds more than in process.

A ratio is the pseudomedian over blocks with its confidence interval (as `task=compare` has it).
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from program import compared, exit_code, new_parser, write_figures

ROOT = Path(__file__).resolve().parents[1]
ENGINE_CORE, CLIENT_CORE = 0, 1
STREAMS = 32
# Output tokens of each request, and requests of each stream. Streams that begin together reach the
# server one after the other, so that a first step has few of them: short loads would show that.
OUTPUT_LEN = {"tiny": 128, "qwen3": 64}
ROUNDS = {"tiny": 8, "qwen3": 1}
ENGINE = ("runtime.device=cpu", "runtime.threads=1", "decoding=greedy", "measure.roofline=false")


def model_knobs(model: str) -> list[str]:
    """Overrides of both arms for a model."""
    return [f"model={model}", *([] if model == "tiny" else ["model.weights=random"])]


def load_knobs(model: str, streams: int) -> list[str]:
    """Overrides of the load: so many requests at a time."""
    count = ROUNDS[model] * streams if streams > 1 else 20
    return [
        "arrival=concurrency",
        f"arrival.concurrency={streams}",
        f"workload.num_requests={count}",
        f"workload.output_len={OUTPUT_LEN[model] if streams > 1 else 8}",
    ]


def run_harness(folder: Path, name: str, cores: set[int], knobs: Sequence[str]) -> dict[str, Any]:
    """One measurement by the harness on these cores; its record.

    Raises:
        SystemExit: it failed; its output is on the terminal.
    """
    places = [f"runs_dir={folder}", f"reports_dir={folder}/reports", f"name={name}"]
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)  # a process has those of the one that starts it
    try:
        done = subprocess.run(
            [sys.executable, "run.py", *knobs, *places],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    finally:
        os.sched_setaffinity(0, own)
    records = list((folder / name).glob("*/record.json"))
    if done.returncode or len(records) != 1:
        raise SystemExit(done.stdout)
    return dict(json.loads(records[0].read_text()))


@contextmanager
def server(model: str) -> Iterator[str]:
    """A server of the model; the base URL of its API."""
    words = [sys.executable, "run.py", "preset=serve", "task.port=0", *model_knobs(model), *ENGINE]
    words += [f"runtime.cores={ENGINE_CORE}", f"task.cores={CLIENT_CORE}"]
    words += ["cache.prefix_caching=false", "decoding.max_tokens=null"]  # as in process
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}  # it logs every request
    with subprocess.Popen(words, cwd=ROOT, text=True, **pipes) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if (found := re.search(r"http://\S+/v1", line)) is None:
                raise SystemExit("the server did not start; python run.py preset=serve says why")
            yield found.group()
        finally:
            process.terminate()


def block(folder: Path, model: str, url: str, number: int, streams: int) -> tuple[Any, Any]:
    """The records of both arms, in process and served, measured one after the other."""
    load = load_knobs(model, streams)
    arms = {
        "in_process": (
            {ENGINE_CORE, CLIENT_CORE},
            [*model_knobs(model), *ENGINE, *load, f"runtime.cores={ENGINE_CORE}"],
        ),
        "served": (
            {CLIENT_CORE},
            [
                *model_knobs(model),
                *load,
                *("runtime.device=cpu", "decoding=greedy", "measure.roofline=false"),
                *("engine=openai", f"engine.url={url}"),
            ],
        ),
    }
    order = list(arms) if number % 2 == 0 else list(reversed(arms))
    found = {
        arm: run_harness(folder, f"{model}-{streams}-{number}-{arm}", *arms[arm]) for arm in order
    }
    return found["in_process"], found["served"]


def figures(model: str, streams: int, pairs: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
    """What the blocks say of one load."""

    def both(*keys: str) -> list[list[float]]:
        values = []
        for pair in pairs:
            found: Any = pair
            records = [record["metrics"] for record in found]
            for key in keys:
                records = [record[key] for record in records]
            values.append([float(value) for value in records])
        return [list(column) for column in zip(*values, strict=True)]

    direct, served = both("output_tokens_per_s")
    logs = [math.log(b / a) for a, b in zip(direct, served, strict=True)]
    ttft_direct, ttft_served = both("ttft_ms", "p50")
    more = [b - a for a, b in zip(ttft_direct, ttft_served, strict=True)]
    return {
        "model": model,
        "streams": streams,
        "blocks": len(pairs),
        "in_process_tokens_per_s": statistics.median(direct),
        "served_tokens_per_s": statistics.median(served),
        **compared(logs),
        "in_process_ttft_p50_ms": statistics.median(ttft_direct),
        "served_ttft_p50_ms": statistics.median(ttft_served),
        "ttft_p50_more_ms": statistics.median(more),
        "ttft_p50_more_ms_blocks": more,
    }


def main() -> None:
    """Entry point; see the module's docstring."""
    parser = new_parser(__doc__, help="also write the figures to this file")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--models", nargs="+", choices=list(OUTPUT_LEN), default=list(OUTPUT_LEN))
    args = parser.parse_args()

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for model in args.models:
            with server(model) as url:
                for streams in (STREAMS, 1):
                    pairs = [
                        block(Path(folder), model, url, number, streams)
                        for number in range(args.blocks)
                    ]
                    rows.append(figures(model, streams, pairs))
                    print(json.dumps(rows[-1]), flush=True)
    write_figures(args.output, {"figures": rows}, "runtime.device=cpu", "runtime.threads=1")


if __name__ == "__main__":
    sys.exit(exit_code(main))
