"""task=convert: conversion of PyTorch's pickled weights, or of a GGUF file, to .safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minivllm.config.groups import Config
from minivllm.errors import BadInput
from minivllm.models.load.gguf.file import is_gguf
from minivllm.models.load.pickled import convert
from minivllm.models.load.source import local_place
from minivllm.platform.untrusted import place
from minivllm.quant.options import PlainQuantOptions


def run(config: dict[str, Any]) -> int:
    """Convert the checkpoint of `model` into the folder `task.output`.

    Args:
        config: the resolved configuration; uses `model.path`, `model.package` and `task`, and of a
            GGUF file `quant`, whose dtype the weights become.

    Returns:
        0.

    Raises:
        BadInput: there is no file to convert, a file is unsafe, or `quant` is not stored; nothing
            is written.
    """
    view = Config.of(config)
    task, path = view.task, _found(view)
    output = place(task.output, f"task.output={task.output}")
    if is_gguf(path):
        count = _convert_gguf(view, path, output)
    else:
        count = convert(path, output, task.timeout_s, task.memory_gb, print)
    print(f"{count} tensors in {output}: model=hf model.path={output}")
    if not (output / "config.json").exists():
        print(f"No config.json lies beside {path}: copy the model's into {output}")
    return 0


def _found(view: Config) -> Path:
    """The file or folder to convert."""
    given = str(vars(view.model).get("path") or "")
    if view["model"].get("package"):
        found = local_place(view["model"])
        assert found is not None
        return found
    path = place(given, f"model.path={given}")
    if str(path) in (".", "embedded") or not path.exists():
        raise BadInput(
            f"model.path={given}: give the folder, or the file, with the pickled weights, or a "
            "GGUF file"
        )
    return path


def _convert_gguf(view: Config, path: Path, output: Path) -> int:
    """Convert a GGUF file, and print what it stores and whether that was rounded. Returns the
    number of tensors."""
    if type(view.quant) is not PlainQuantOptions:
        raise BadInput(
            f"task=convert writes quant=bf16, fp16 or fp32, and no quant="
            f"{view['choices'].get('quant')}: choose it where the new checkpoint is loaded"
        )
    from minivllm.models.load.gguf.checkpoint import GGUFCheckpoint
    from minivllm.models.load.gguf.saving import convert as convert_gguf
    from minivllm.platform.progress_bar import ProgressBar

    dtype = str(view.quant.dtype)
    with ProgressBar("converting") as bar:
        count = convert_gguf(path, output, dtype, bar)
    checkpoint = GGUFCheckpoint.open(path)
    print(f"{checkpoint.contents()}: {checkpoint.conversion(dtype)}")
    return count
