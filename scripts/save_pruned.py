"""Save a pruned model as a checkpoint that transformers, vLLM and this project load.

    python scripts/save_pruned.py FOLDER OUTPUT pruning=layers pruning.num_layers=2
    python run.py model=hf model.path=OUTPUT

The overrides are those of `pruning`; see docs/guides/pruning.md. Masks are saved as zeros.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from program import exit_code, new_parser

from minivllm.assembly import build_engine
from minivllm.config.compose import compose
from minivllm.config.groups import Config
from minivllm.errors import BadInput
from minivllm.models.load.source import EMBEDDED
from minivllm.passes.pruning.calibration import pruning_plan
from minivllm.passes.pruning.saving import save_pruned


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns 0; raises BadInput."""
    parser = new_parser(__doc__)
    parser.add_argument("folder", type=Path, help="the checkpoint, or `embedded`")
    parser.add_argument("output", type=Path, help="a folder that does not exist")
    parser.add_argument("overrides", nargs="+", help="pruning=... and its knobs")
    given = parser.parse_args(arguments)
    folder = EMBEDDED if str(given.folder) == "embedded" else given.folder
    config = Config.of(
        compose(["model=hf", f"model.path={folder}", "runtime.device=cpu", *given.overrides])
    )
    plan = pruning_plan(config, config["model"], config["pruning"], build_engine)
    if plan is None:
        raise BadInput("nothing is left out: add pruning=layers, width, magnitude or wanda")
    count = save_pruned(folder, plan, given.output)
    print(*plan.notes, f"{count} tensors in {given.output}", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
