"""Checkpoints that are written: a folder that exists only when it is complete."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from minivllm.errors import BadInput
from minivllm.models.config import ModelConfig
from minivllm.models.load.filling import tensor_shapes
from minivllm.models.vision.registry import stored_name, vision_tower
from minivllm.platform.folders import TemporaryFolder


def require_new(output: Path) -> None:
    """Raise BadInput where there is such a file or folder."""
    if output.exists():
        raise BadInput(f"{output} exists already: give a new folder")


def stored_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The dtype of a checkpoint's weights, as its config.json names it."""
    dtype: torch.dtype = getattr(torch, ModelConfig.from_dict(config).dtype or "bfloat16")
    return dtype


def save_checkpoint(
    output: Path,
    config: Mapping[str, Any],
    fill: Callable[[str, Tensor], None],
    beside: Callable[[Path], None],
) -> int:
    """Write a checkpoint in the dtype that its config.json names.

    Args:
        output: a folder, which must not exist.
        config: its config.json.
        fill: writes the weights of a tensor, given the model's name for it.
        beside: writes further files into a folder.

    Returns:
        The number of tensors.

    Raises:
        BadInput: `output` exists.
    """
    require_new(output)
    dtype, architecture = stored_dtype(config), str(config["architectures"][0])
    with torch.device("meta"):
        tower = vision_tower(config)
    shapes = tensor_shapes(ModelConfig.from_dict(config), dtype)
    tensors = {}
    for name, shape in (shapes | ({} if tower is None else tower.shapes)).items():
        assert shape is not None
        tensor = tensors[stored_name(name, architecture)] = torch.empty(shape, dtype=dtype)
        fill(name, tensor)
    output.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryFolder(f".{output.name}.", str(output.parent)) as temporary:
        made = Path(temporary) / "made"
        made.mkdir()
        save_file(tensors, made / "model.safetensors", {"format": "pt"})
        text = json.dumps(dict(config), indent=2)
        (made / "config.json").write_text(f"{text}\n", encoding="utf-8")
        beside(made)
        os.replace(made, output)
    return len(tensors)
