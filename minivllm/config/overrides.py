"""Overrides: made of the words of a command, such as `serve qwen3` or `compare before after`;
without secrets, as they are stored, name arms and are handed to a launcher; and what they set.
Torch-free."""

from __future__ import annotations

import copy
import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.config.groups import conf_dir
from minivllm.errors import BadInput, nearest
from minivllm.masking import MASK, is_secret
from minivllm.redaction import redact

if TYPE_CHECKING:
    from omegaconf import DictConfig

OF_RUNS = ("compare", "report", "view")  # tasks whose further words are runs
_WORD = re.compile(r"(?<![\w/\\])[A-Za-z][\w-]*")  # but no part of a path


@functools.lru_cache(maxsize=1 << 14)  # the arms of a sweep have most of theirs in common
def hidden(text: str) -> str:
    """An override, or another word of a command, without secrets: as it was if it has none,
    whatever was learned."""
    key, equals, _ = text.partition("=")
    # the part that makes it secret
    name = next(filter(is_secret, key.lstrip("+~-").split(".")), "")
    if not equals:
        return str(redact(text))
    from hydra.core.override_parser.overrides_parser import OverridesParser  # workers do without
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_override(text)
    except HydraException:
        parsed = None
    # no override, or quotes or brackets are not closed: where a secret ends is unknown
    if parsed is None:
        first = next((word for word in _WORD.finditer(text) if is_secret(word[0])), None)
        return f"{redact(text[: first.end()])}={MASK}" if first else str(redact(text))
    if parsed.is_sweep_override():  # several values
        return f"{key}={MASK}" if name else str(redact(text))
    before, after = (written(value) for value in (parsed._value, redact(parsed._value, name)))
    return text if before == after else f"{key}={after}"


def written(value: Any) -> str:
    """A value in the grammar of overrides."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{written(key)}: {written(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(written, value))}]"
    if isinstance(value, str) and "${" in value:  # braces and colons of an interpolation stay
        return value
    from hydra.core.override_parser.types import Override

    return Override._get_value_element_as_str(value)


def without_secrets(config: DictConfig) -> DictConfig:
    """A composed configuration for a launcher, which may store it: secrets in it, and in the
    overrides that Hydra keeps there, are masked. Jobs are composed of their own overrides, not of
    this."""
    from omegaconf import OmegaConf, open_dict, read_write

    given = OmegaConf.select(config, "hydra.overrides.task")
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    masked = redact(plain)
    changed = dict(_differences(plain, masked))
    changed.update(
        {("hydra", "overrides", "task", i): hidden(text) for i, text in enumerate(given or ())}
    )
    if not changed:
        return config
    result = copy.deepcopy(config)
    with read_write(result), open_dict(result):
        for path, value in changed.items():
            node: Any = result
            for key in path[:-1]:
                node = node[key]
            node[path[-1]] = value
    return result


def _differences(
    before: Any, after: Any, path: tuple[Any, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The values that differ in two nests of one shape, with the keys that lead to them."""
    if isinstance(before, Mapping):
        for key, value in before.items():
            yield from _differences(value, after[key], (*path, key))
    elif isinstance(before, list):
        for index, value in enumerate(before):
            yield from _differences(value, after[index], (*path, index))
    elif before != after:
        yield path, after


def given_knobs(group: str, overrides: Sequence[str]) -> list[str]:
    """The knobs of a group that overrides set, and the group's own name where they choose an option
    of it."""
    names = [text.lstrip("+~").partition("=")[0] for text in overrides]
    return [
        name.removeprefix(f"{group}.")
        for name in names
        if name == group or name.startswith(f"{group}.")
    ]


def quoted(text: str) -> str:
    """A text as Hydra's override grammar reads it back, whatever characters are in it."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


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
