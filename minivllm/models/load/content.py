"""Which files hold a model's weights, and a digest over all of their bytes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import xxhash

from minivllm.platform import files

CHUNK = 8 << 20  # bytes that are read at a time


def weight_files(folder: Path) -> list[Path]:
    """The .safetensors files of a folder, or the GGUF file itself, with its further parts."""
    if not folder.is_file():
        return sorted(folder.glob("*.safetensors"))
    from minivllm.models.load.gguf.parts import named_parts

    return [folder, *(part for part in named_parts(folder)[1:] if part.exists())]


def content_digest(folder: Path | None) -> str | None:
    """XXH3 (128 bits) over the names and all bytes of the weight files; None where there are none,
    or they cannot be read.

    The result is kept in the user's cache folder by the state of the files on disk (size, number,
    and times of the last change of content and of state, of which a user cannot set the latter), so
    that the bytes are read once.

    Args:
        folder: with .safetensors files, or a GGUF file.
    """
    try:
        found = [] if folder is None else weight_files(folder)
        if not found:
            return None
        key = hashlib.sha256(json.dumps(_states(found)).encode()).hexdigest()[:32]
        kept = files.cache_folder() / "digests" / f"{key}.txt"
        with contextlib.suppress(OSError, ValueError):
            if len(digest := kept.read_text(encoding="ascii")) == 32:
                return digest
        digest = _digest(found)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(kept, digest)
    return digest


def _states(found: Sequence[Path]) -> list[tuple[str, int, int, int, int]]:
    states = [(str(file.resolve()), os.stat(file)) for file in found]
    return [(name, s.st_size, s.st_ino, s.st_mtime_ns, s.st_ctime_ns) for name, s in states]


def _digest(found: Sequence[Path]) -> str:
    total = xxhash.xxh3_128()
    for file in found:
        total.update(f"{file.name}:{file.stat().st_size}:".encode())
        with file.open("rb") as stream:
            while chunk := stream.read(CHUNK):
                total.update(chunk)
    return total.hexdigest()
