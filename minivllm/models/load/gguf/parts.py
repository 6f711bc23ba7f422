"""The files of a split model: llama.cpp divides its tensors among files, of which the first has the
metadata. Free of torch.

`model-00001-of-00003.gguf` is the name of the first of three, and in each file `split.no` (from 0
on), `split.count` and `split.tensors.count` (of all files) say the same."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minivllm.errors import BadInput
from minivllm.models.load.names import StoredTensor
from minivllm.platform.untrusted import printable
from minivllm.platform.values import Values

_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MOST = (1 << 16) - 1  # of a model, whose number has 16 bits


def named_parts(path: Path) -> list[Path]:
    """The paths that all parts have, if the file's name is that of a first part; else the file."""
    match = _NAME.fullmatch(path.name)
    if match is None or int(match[2]) != 1:
        return [path]
    return [path.with_name(_name(match[1], i, int(match[3]))) for i in range(int(match[3]))]


def _name(model: str, number: int, count: int) -> str:
    return f"{model}-{number + 1:05d}-of-{count:05d}.gguf"


def other_parts(path: Path, values: Values) -> list[Path]:
    """The paths of the further parts of a file; none if it is whole.

    Args:
        path: of the file.
        values: its metadata.

    Raises:
        BadInput: it is a part, but not the first, or its name is not that of a first part, or
            another part is missing.
    """
    count = values.integer("split.count", 1, low=0, high=_MOST)
    if count <= 1:
        return []
    number = values.integer("split.no", 0, low=0, high=_MOST)
    match = _NAME.fullmatch(path.name)
    name = _name(match[1] if match else "NAME", 0, count)
    if number:
        raise BadInput(f"{path} is part {number + 1} of a split model: give the first, {name}")
    paths = named_parts(path)
    if len(paths) != count:
        raise BadInput(
            f"{path} is the first of {count} parts, which are found by their names: call it {name}"
        )
    if missing := [part.name for part in paths if not part.exists()]:
        raise BadInput(
            f"{path} is the first of {count} parts, of which {missing[0]} is missing "
            f"({len(missing)} such): put all into one folder"
        )
    return paths[1:]


def all_tensors(
    parts: Mapping[Path, tuple[Mapping[str, Any], Mapping[str, StoredTensor]]],
) -> dict[str, StoredTensor]:
    """The tensors of a model by name.

    Args:
        parts: metadata and tensors of each part, the first one first.

    Raises:
        BadInput: one of them is a part of another model.
    """
    first, *_ = parts
    total = parts[first][0].get("split.tensors.count")
    tensors: dict[str, StoredTensor] = {}
    for number, (path, (metadata, own)) in enumerate(parts.items()):
        says = [metadata.get(f"split.{key}") for key in ("no", "count", "tensors.count")]
        if number and says != [number, len(parts), total]:
            raise BadInput(
                f"{path} is of another model than {first.name}: its split.no, split.count and "
                f"split.tensors.count are {says} and not {[number, len(parts), total]}"
            )
        if twice := tensors.keys() & own.keys():
            raise BadInput(
                f"{path} and another part of {first.name} have tensor {printable(min(twice))}"
            )
        tensors |= own
    if total not in (None, len(tensors)):
        raise BadInput(
            f"{first} and its other parts have {len(tensors)} tensors, and split.tensors.count "
            f"says {total}: a part is of another model"
        )
    return tensors
