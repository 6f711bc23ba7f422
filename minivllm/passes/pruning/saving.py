"""A pruned model as a checkpoint that transformers and this project load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from minivllm.errors import BadInput
from minivllm.models.config import ModelConfig
from minivllm.models.load.checkpoint import Checkpoint
from minivllm.models.load.filling import tensor_shapes
from minivllm.models.load.saving import save_checkpoint, stored_dtype
from minivllm.models.load.weights import CheckpointWeights
from minivllm.models.registry import sees
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
