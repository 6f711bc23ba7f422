"""The words of a command, such as `serve qwen3` or `compare before after`, as overrides."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from minivllm.config.compose import conf_dir, quoted
from minivllm.errors import BadInput, nearest

OF_RUNS = ("compare", "report", "view")  # tasks whose further words are runs


def model_overrides(model: str, config_dir: str | Path | None = None) -> list[str]:
    """The overrides that choose a model.

    Args:
        model: an option of conf/model, a checkpoint folder or a hub id.
        config_dir: a further folder of option files.
    """
    folders = [conf_dir(), *([] if config_dir is None else [Path(config_dir)])]
    # os.path.isfile returns False for an impossible file name, such as one of 300 characters.
    if any(os.path.isfile(folder / "model" / f"{model}.yaml") for folder in folders):
        return [f"model={model}"]
    return ["model=hf", f"model.path={quoted(model)}"]


def as_overrides(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command with its leading words replaced by overrides.

    The first word names a task, or the preset of that name where there is one. Those after it are
    runs for a task that reads runs; for any other, one word is the model.

    Raises:
        BadInput: the first word is no task, or the task takes fewer words.
    """
    rest = list(arguments)
    flags = [rest.pop(0) for _ in arguments[:1] if rest[0] in ("-m", "--multirun")]
    words = []
    while rest and re.fullmatch(r"[^-+~=][^=]*", rest[0]):
        words.append(rest.pop(0))
    return [*flags, *_overrides(words), *rest]


def _overrides(words: Sequence[str]) -> list[str]:
    if not words:
        return []
    task, *given = words
    tasks = sorted(path.stem for path in (conf_dir() / "task").glob("*.yaml"))
    if task not in tasks:
        raise BadInput(
            f"{task}: no such task; {nearest(task, tasks)}; settings are written KEY=VALUE"
        )
    preset = (conf_dir() / "preset" / f"{task}.yaml").exists()
    chosen = f"preset={task}" if preset else f"task={task}"
    if task in OF_RUNS:
        return [chosen, *([f"runs=[{','.join(map(quoted, given))}]"] if given else [])]
    if len(given) > 1:
        raise BadInput(
            f"{given[1]}: after the task {task} one word may name the model; settings are written "
            "KEY=VALUE"
        )
    return [chosen, *(override for model in given for override in model_overrides(model))]
