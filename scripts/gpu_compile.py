"""Compile Triton's kernels for the shapes of some models, with a process for each core, into the
cache that later processes read.

    python scripts/gpu_compile.py --models qwen3 qwen3_8b [--processes N]

Each kernel is launched as it is when it is measured by itself (task=kernels), once, on small
inputs. The exit code is 1 if one of them fails; the others are compiled.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING

from program import exit_code, new_parser

if TYPE_CHECKING:
    from minivllm.bench.microbench.case import Setting

ROWS = (1, 2, 4, 16, 24, 64)  # of the tiles of 8 to 64 rows; and sequences that decode
CONTEXTS = (100, 600, 5000)  # attention in one piece, in pieces of 128 keys and of 512
FORMATS = ("bf16", "int8", "nf4", "int4")
PARTS = ("products", "attention", "small steps", "sampling")


def setting(model: str, device: str) -> Setting:
    """The shapes of a model, one copy of every input. Raises BadInput for an unknown model."""
    import torch

    from minivllm.bench.microbench.case import Setting
    from minivllm.config.compose import compose
    from minivllm.models.config import ModelConfig
    from minivllm.models.load.source import resolve

    config = compose([f"model={model}", "model.weights=random"])
    sizes = ModelConfig.from_dict(resolve(config["model"], allow_random=True)[1].config)
    return Setting(sizes, torch.device(device), True, 0, ROWS, CONTEXTS, 0, FORMATS)


def launches(at: Setting) -> Iterator[tuple[str, Callable[[], object]]]:
    """Every kernel's name and its launch."""
    from minivllm.bench.microbench import suite

    for part in PARTS:
        for case in suite.PARTS[part].cases(at):
            name = f"{case.kernel} ({case.part}, {case.rows} rows)"
            yield name, lambda call=case.ours.call: call(0)  # type: ignore[misc]


def compile_share(models: Sequence[str], number: int, count: int, device: str) -> list[str]:
    """Launch each `count`th kernel of each model, from the `number`th on; returns what failed."""
    import torch

    failed = []
    with torch.inference_mode():
        for model in models:
            for name, launch in islice(launches(setting(model, device)), number, None, count):
                try:
                    launch()
                    if device != "cpu":
                        torch.cuda.synchronize()
                except Exception as error:
                    failed.append(f"{model}: {name}: {error}")
    return failed


def main() -> int:
    """Entry point; see the module's docstring. Returns the exit code."""
    parser = new_parser(__doc__)
    parser.add_argument("--models", nargs="+", required=True, help="options of the group model")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    begin, count = time.monotonic(), given.processes
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        shares = [
            pool.submit(compile_share, given.models, number, count, "cuda")
            for number in range(count)
        ]
        failed = [line for share in shares for line in share.result()]
    print(*failed, sep="\n")
    print(f"{count} processes, {time.monotonic() - begin:.1f} s, {len(failed)} kernels failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
