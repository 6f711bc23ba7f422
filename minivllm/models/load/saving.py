"""Checkpoints that are written: a folder that exists only when it is complete."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from minivllm.errors import BadInput
from minivllm.models.config import ModelConfig
from minivllm.models.load.checkpoint import shard_name, share, write_index
from minivllm.models.load.filling import tensor_shapes
from minivllm.models.load.names import published_name
from minivllm.models.vision.registry import stored_name, vision_tower
from minivllm.platform.folders import new_folder
from minivllm.quant.base import Shapes

SHARD = 4 << 30  # most bytes of a file, and of weights in memory, but for a larger tensor


def stored_dtype(config: Mapping[str, Any]) -> torch.dtype:
    """The dtype of a checkpoint's weights, as its config.json names it."""
    dtype: torch.dtype = getattr(torch, ModelConfig.from_dict(config).dtype or "bfloat16")
    return dtype


def save_checkpoint(
    output: Path,
    config: Mapping[str, Any],
    fill: Callable[[str, Tensor], None],
    beside: Callable[[Path], None],
    what: str = "",
) -> int:
    """Write a checkpoint in the dtype that its config.json names.

    Args:
        output: a folder, which must not exist.
        config: its config.json.
        fill: writes the weights of a tensor, given the model's name for it.
        beside: writes further files into a folder; called before the weights are filled, so that
            what is wrong there is known at once.
        what: how messages begin, such as "task.output=DIR"; the path where it is empty.

    Returns:
        The number of tensors.

    Raises:
        BadInput: as `new_folder`; or the dtype is too narrow for a finite weight.
    """
    dtype, architecture = stored_dtype(config), str(config["architectures"][0])
    with torch.device("meta"):
        tower = vision_tower(config)
    shapes = tensor_shapes(ModelConfig.from_dict(config), dtype)
    shapes |= {} if tower is None else tower.shapes
    sizes = {name: math.prod(shape or ()) * dtype.itemsize for name, shape in shapes.items()}
    total, shards = sum(sizes.values()), _shards(sizes)
    weight_map: dict[str, str] = {}
    with new_folder(output, what, total) as made:
        text = json.dumps(dict(config), indent=2)
        (made / "config.json").write_text(f"{text}\n", encoding="utf-8")
        beside(made)
        for number, names in enumerate(shards, start=1):
            file = shard_name(number, len(shards))
            tensors = _filled(names, shapes, dtype, fill, architecture)
            try:
                save_file(tensors, made / file, {"format": "pt"})
            except SafetensorError as error:
                raise OSError(str(error)) from None
            share(made / file)
            weight_map |= dict.fromkeys(tensors, file)
        if len(shards) > 1:
            write_index(made, weight_map, total)
    return len(weight_map)


def _filled(
    names: list[str],
    shapes: Shapes,
    dtype: torch.dtype,
    fill: Callable[[str, Tensor], None],
    architecture: str,
) -> dict[str, Tensor]:
    """The weights of some tensors, by the names that checkpoints of the architecture have."""
    tensors = {}
    for name in names:
        shape = shapes[name]
        assert shape is not None
        own = published_name(stored_name(name, architecture), architecture)
        tensor = tensors[own] = torch.empty(shape, dtype=dtype)
        fill(name, tensor)
        _check_range(name, tensor, fill)
    return tensors


def _check_range(name: str, tensor: Tensor, fill: Callable[[str, Tensor], None]) -> None:
    """Raise BadInput for a filled tensor where a finite weight became infinite."""
    if all(end.isfinite() for end in tensor.aminmax()):
        return
    exact = torch.empty_like(tensor, dtype=torch.float32)
    fill(name, exact)
    beyond = exact[exact.isfinite() & ~tensor.isfinite()]
    if len(beyond):
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise BadInput(
            f"tensor {name} has the weight {beyond[0].item():g}, beyond the range of {dtype}: "
            "take bfloat16 or float32"
        )


def _shards(sizes: Mapping[str, int]) -> list[list[str]]:
    """The names of the tensors of each file, in their order."""
    shards: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if shards[-1] and held + size > SHARD:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    return shards
