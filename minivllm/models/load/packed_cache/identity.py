"""What packed weights depend on. Free of torch."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from minivllm.models.load.content import weight_files
from minivllm.models.load.source import Source

_PACKAGE = Path(__file__).parents[3]
# The rooms that decide how weights are read, quantised and packed.
_ROOMS = ("kernels", "models", "quant")
_LIBRARIES = ("torch", "bitsandbytes", "gguf")
FORMAT = 1  # of the files


def identity(source: Source, quant: Any, variant: str) -> dict[str, Any]:
    """Everything that the packed weights of a model depend on, as JSON.

    Args:
        source: of the weights.
        quant: the quantisation method, a dataclass of options.
        variant: of the kernels.
    """
    options = {item.name: str(getattr(quant, item.name)) for item in fields(quant)}
    return {
        "format": FORMAT,
        "weights": source.fingerprint,
        "files": _files(source),
        "quant": [f"{type(quant).__module__}.{type(quant).__qualname__}", options],
        "kernels": variant,
        "code": _code(),
        "libraries": {name: _version(name) for name in _LIBRARIES},
    }


def key_of(whole: Mapping[str, Any]) -> str:
    """32 hexadecimal digits for an identity."""
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:32]


def _files(source: Source) -> list[list[Any]]:
    """Name, bytes and time of the last change of each weight file.

    The fingerprint covers the first 4 KiB of each tensor, and a change of the rest changes the
    time."""
    if source.weights != "checkpoint" or source.folder is None:
        return []
    states = [(file.name, os.stat(file)) for file in weight_files(source.folder)]
    return [[name, state.st_size, state.st_mtime_ns] for name, state in states]


@functools.cache
def _code() -> str:
    """Hash of the sources of `_ROOMS`."""
    total = hashlib.sha256()
    for room in _ROOMS:
        for path in sorted((_PACKAGE / room).rglob("*")):
            if path.suffix in (".py", ".cpp", ".h"):
                total.update(str(path.relative_to(_PACKAGE)).encode())
                total.update(path.read_bytes())
    return total.hexdigest()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
