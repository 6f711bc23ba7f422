"""A folder of safetensors files: what is in it, checked before a weight is read. Free of torch.

The format is an 8-byte little-endian header length, a JSON header and the tensors' bytes
(https://github.com/huggingface/safetensors). Tensors are read by plain reads, not through a mapping, so
that a process's memory is the model and not also the file.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from minivllm.errors import BadInput

INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100_000_000  # the format's own limit
_TEXT = "language_model."  # where a model that sees images, too, has its text model; the rest is not read
_SAMPLE = 4096  # bytes of each tensor that enter the fingerprint
_ITEM_SIZE = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: bytes [begin, end) of the file."""

    file: Path
    dtype: str  # the format's name, e.g. "BF16"
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of one folder, by name."""

    folder: Path
    files: tuple[Path, ...]
    tensors: dict[str, StoredTensor]

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read the index and every header; no weight.

        Raises:
            BadInput: a file is missing, unreadable or shorter than its header says.
        """
        files = _weight_files(folder)
        tensors: dict[str, StoredTensor] = {}
        for file in files:
            tensors.update(_read_header(file))
        text = {
            name.removeprefix(_TEXT): tensor for name, tensor in tensors.items() if name.startswith(_TEXT)
        }
        return cls(folder, files, text or tensors)

    def fingerprint(self) -> str:
        """SHA-256 over config.json, each file's size and header, and the first 4 KiB of every tensor."""
        digest = hashlib.sha256((self.folder / "config.json").read_bytes())
        for file in self.files:
            size = file.stat().st_size
            digest.update(f"{file.name}:{size}".encode())
            with file.open("rb") as stream:
                start = 8 + int.from_bytes(stream.read(8), "little")
                stream.seek(0)
                digest.update(stream.read(start))
                for tensor in self.tensors.values():
                    if tensor.file == file:
                        stream.seek(tensor.begin)
                        digest.update(stream.read(min(_SAMPLE, tensor.end - tensor.begin)))
        return digest.hexdigest()


def read_json(file: Path, what: str) -> dict[str, Any]:
    """A JSON object. Raises BadInput, naming the file, if it is anything else."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"{file} does not exist: {what}") from None
    except (OSError, ValueError) as error:
        raise BadInput(f"{file} is not readable as JSON ({error}): {what}") from None
    if not isinstance(value, dict):
        raise BadInput(f"{file} is not a JSON object: {what}")
    return value


def _weight_files(folder: Path) -> tuple[Path, ...]:
    index = folder / INDEX
    if index.exists():
        what = "download the checkpoint again"
        weight_map = read_json(index, what).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise BadInput(f"{index} has no weight_map: {what}")
        files = tuple(folder / name for name in sorted(set(weight_map.values())))
        gone = [file.name for file in files if not file.is_file()]
        if gone:
            raise BadInput(f"{index} names {gone[0]}, which {folder} lacks ({len(gone)} missing): {what}")
        return files
    files = tuple(sorted(folder.glob("*.safetensors")))
    if files:
        return files
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise BadInput(
            f"{folder} holds pickled weights (.bin, .pt), which are not loaded because they can run code: "
            "convert them with transformers' save_pretrained, or take a checkpoint with .safetensors files"
        )
    raise BadInput(
        f"{folder} has no .safetensors file: give a folder with a checkpoint, or model.weights=random"
    )


def _read_header(file: Path) -> dict[str, StoredTensor]:
    again = "the file is damaged or its download was cut short; fetch it again"
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            header, start = _parse_header(stream, size)
        found = {
            name: _stored(file, entry, start) for name, entry in header.items() if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{file} is not a readable safetensors file ({error}): {again}") from None
    ends = max((tensor.end for tensor in found.values()), default=start)
    if ends != size:
        raise BadInput(f"{file} has {size} bytes where its header says {ends}: {again}")
    return found


def _parse_header(stream: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(stream.read(8), "little")
    if not 2 <= length <= min(_MAX_HEADER, size - 8):
        raise ValueError(f"header length {length} in a file of {size} bytes")
    header = json.loads(stream.read(length))
    if not isinstance(header, dict):
        raise ValueError("header is not an object")
    return header, 8 + length


def _stored(file: Path, entry: dict[str, Any], start: int) -> StoredTensor:
    begin, end = entry["data_offsets"]
    shape = tuple(int(n) for n in entry["shape"])
    count = 1
    for n in shape:
        count *= n
    item = _ITEM_SIZE.get(entry["dtype"])
    if begin < 0 or (item is not None and end - begin != count * item):
        raise ValueError(f"{entry['dtype']}{list(shape)} in bytes {begin} to {end}")
    return StoredTensor(file, entry["dtype"], shape, start + begin, start + end)
