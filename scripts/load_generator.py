"""A public load generator beside the server's own record of the same requests.

    python -m venv build/guidellm && build/guidellm/bin/pip install guidellm
    python scripts/load_generator.py build/guidellm/bin/guidellm \\
        --output reports/examples/cpu/load_generator.json

guidellm asks `preset=serve task.record=true` for completions, with 1 and 8 streams. The engine has
core 0 and one thread; HTTP and guidellm share core 1. Throughput and ITL should agree. TTFT cannot:
the server's begins where it has the tokens of the prompt and ends where the engine has the first
token; guidellm's begins before its client makes the request and ends where its client has parsed
the first event.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from program import exit_code, new_parser, write_figures

ROOT = Path(__file__).resolve().parents[1]
STREAMS = (1, 8)
REQUESTS = 64
TOKENIZER = ROOT / "minivllm" / "assets" / "tiny"
SERVE = (
    *("preset=serve", "task.port=0", "task.record=true", "task.cores=1"),
    *("runtime.device=cpu", "runtime.threads=1", "runtime.cores=0", "cache.prefix_caching=false"),
    *("decoding=greedy", "decoding.max_tokens=null", "name=served"),
)


def guidellm_command(program: Path, url: str, streams: int, output: Path) -> list[str]:
    """The load generator's command line."""
    return [
        *(str(program), "run", "--disable-progress"),
        *("--backend", f"kind=openai_http,target={url},model=tiny,request_format=/v1/completions"),
        *("--profile", f"kind=concurrent,streams={streams}"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"),
        *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=128"),
        *("--output", f"kind=json,path={output}"),
    ]


def measure(program: Path, streams: int, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The server's record of one run, and the load generator's metrics of it.

    Raises:
        SystemExit: one of them failed; its output is on the terminal.
    """
    places = [f"runs_dir={folder}", f"reports_dir={folder}/reports"]
    server = subprocess.Popen(
        [sys.executable, "run.py", *SERVE, *places],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert server.stdout is not None
    line = server.stdout.readline()
    found = re.search(r"http://\S+(?=/v1)", line)
    output = folder / "load.json"
    try:
        if found is None:
            raise SystemExit("the server did not start; python run.py preset=serve says why")
        done = subprocess.run(
            guidellm_command(program, found.group(), streams, output),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            preexec_fn=lambda: os.sched_setaffinity(0, {1}),
        )
        if done.returncode:
            raise SystemExit(done.stdout)
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=120)
    (record,) = (folder / "served").glob("*/record.json")
    return json.loads(record.read_text()), json.loads(output.read_text())["benchmarks"][0]


def compared(streams: int, record: dict[str, Any], load: dict[str, Any]) -> dict[str, Any]:
    """Both sides' figures, and the load generator's over the server's."""
    ours = record["metrics"]
    names = ("output_tokens_per_second", "inter_token_latency_ms", "time_to_first_token_ms")
    theirs = {name: load["metrics"][name]["successful"] for name in names}
    pairs = {
        "output_tokens_per_s": (
            ours["output_tokens_per_s"],
            theirs["output_tokens_per_second"]["mean"],
        ),
        "itl_mean_ms": (ours["itl_ms"]["mean"], theirs["inter_token_latency_ms"]["mean"]),
        "ttft_mean_ms": (ours["ttft_ms"]["mean"], theirs["time_to_first_token_ms"]["mean"]),
    }
    return {
        "streams": streams,
        "requests": ours["num_requests"],
        **{
            name: {"server": own, "load_generator": other, "ratio": other / own}
            for name, (own, other) in pairs.items()
        },
    }


def main() -> None:
    """Entry point; see the module's docstring."""
    parser = new_parser(__doc__, help="also write the figures to this file")
    parser.add_argument("guidellm", type=Path, help="its program, in an environment of its own")
    args = parser.parse_args()
    if not args.guidellm.is_file():
        parser.error(f"{args.guidellm} is no program: pip install guidellm")

    version = subprocess.run([args.guidellm, "--version"], capture_output=True, text=True).stdout
    rows = []
    for streams in STREAMS:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(compared(streams, *measure(args.guidellm, streams, Path(folder))))
        print(json.dumps(rows[-1], indent=1), flush=True)
    figures = {"load_generator": version.strip(), "figures": rows}
    write_figures(args.output, figures, "runtime.device=cpu", "runtime.threads=1")


if __name__ == "__main__":
    sys.exit(exit_code(main))
