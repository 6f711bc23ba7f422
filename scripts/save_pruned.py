"""Save a pruned model as a checkpoint that transformers, vLLM and this project load.

    python scripts/save_pruned.py FOLDER OUTPUT pruning=layers pruning.num_layers=2
    python run.py model=hf model.path=OUTPUT

The overrides are those of `pruning`; see docs/guides/pruning.md. Masks are saved as zeros.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from program import exit_code, new_parser

from minivllm.assembly import build_engine
from minivllm.config.compose import compose
from minivllm.config.groups import Config
from minivllm.errors import BadInput
from minivllm.models.config import ModelConfig
from minivllm.models.load.checkpoint import Checkpoint
from minivllm.models.load.filling import tensor_shapes
from minivllm.models.load.saving import save_checkpoint, stored_dtype
from minivllm.models.load.source import EMBEDDED
from minivllm.models.load.weights import CheckpointWeights
from minivllm.models.registry import sees
from minivllm.passes.pruning.calibration import pruning_plan
from minivllm.passes.pruning.plan import PruningPlan
from minivllm.platform.folders import require_new

# Files of a checkpoint that stay as they are.
BESIDE = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
    *("generation_config.json", "chat_template.jinja", "vocab.json", "merges.txt"),
)


def save_pruned(folder: Path, plan: PruningPlan, output: Path) -> int:
    """Write a checkpoint without what a plan leaves out, in the dtype that config.json names.

    Args:
        folder: of the whole checkpoint.
        plan: what is left out.
        output: a folder, which must not exist; it exists only when it is complete.

    Returns:
        The number of tensors.

    Raises:
        BadInput: `output` exists, or the checkpoint is not usable.
    """
    require_new(output)
    whole = ModelConfig.from_dict(json.loads((folder / "config.json").read_text()))
    if sees(whole.architecture):
        raise BadInput("pruning: models that take images are not pruned")
    dtype = stored_dtype(plan.config)
    weights = plan.weights(CheckpointWeights(Checkpoint.open(folder)), tensor_shapes(whole, dtype))
    shapes = tensor_shapes(ModelConfig.from_dict(plan.config), dtype)
    weights.check(shapes, whole.tie_word_embeddings)

    def copy_others(made: Path) -> None:
        for name in BESIDE:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, made / name)

    return save_checkpoint(output, plan.config, weights.fill, copy_others)


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
