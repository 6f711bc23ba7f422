"""A pruned model as a checkpoint that transformers and this project load."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from minivllm.errors import BadInput
from minivllm.models.config import ModelConfig
from minivllm.models.load.checkpoint import Checkpoint
from minivllm.models.load.loading import tensor_shapes
from minivllm.models.load.weights import CheckpointWeights
from minivllm.passes.pruning.plan import PruningPlan

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
    if output.exists():
        raise BadInput(f"{output} exists already: give a new folder")
    whole = ModelConfig.from_dict(json.loads((folder / "config.json").read_text()))
    pruned = ModelConfig.from_dict(plan.config)
    dtype = getattr(torch, whole.dtype or "bfloat16")
    weights = plan.weights(CheckpointWeights(Checkpoint.open(folder)), tensor_shapes(whole, dtype))
    shapes = tensor_shapes(pruned, dtype)
    weights.check(shapes, whole.tie_word_embeddings)
    tensors = {}
    for name, shape in shapes.items():
        assert shape is not None
        tensors[name] = torch.empty(shape, dtype=dtype)
        weights.fill(name, tensors[name])
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as temporary:
        made = Path(temporary) / "made"
        made.mkdir()
        save_file(tensors, made / "model.safetensors", {"format": "pt"})
        (made / "config.json").write_text(json.dumps(plan.config, indent=2) + "\n")
        for name in BESIDE:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, made / name)
        os.replace(made, output)
    return len(tensors)
