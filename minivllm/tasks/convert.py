"""task=convert: conversion of PyTorch's pickled weights to .safetensors."""

from __future__ import annotations

from typing import Any

from minivllm.config.groups import Config
from minivllm.errors import BadInput
from minivllm.models.load.pickled import convert
from minivllm.platform.untrusted import place


def run(config: dict[str, Any]) -> int:
    """Convert the checkpoint at `model.path` into the folder `task.output`.

    Args:
        config: the resolved configuration; uses `model.path` and `task`.

    Returns:
        0.

    Raises:
        BadInput: there is no pickled file, or a file is unsafe; nothing is written.
    """
    view = Config.of(config)
    task, given = view.task, str(vars(view.model).get("path") or "")
    path = place(given, f"model.path={given}")
    if str(path) in (".", "embedded") or not path.exists():
        raise BadInput(
            f"model.path={given}: give the folder, or the file, with the pickled weights"
        )
    output = place(task.output, f"task.output={task.output}")
    count = convert(path, output, task.timeout_s, task.memory_gb, print)
    print(f"{count} tensors in {output}: model=hf model.path={output}")
    if not (output / "config.json").exists():
        print(f"No config.json lies beside {path}: copy the model's into {output}")
    return 0
