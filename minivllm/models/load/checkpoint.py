"""A folder of safetensors files, checked before a weight is read. Free of torch.

The format is an 8-byte little-endian header length, a JSON header and the tensors' bytes
(https://github.com/huggingface/safetensors). Tensors are read by plain reads, not through a
mapping, so that the process's memory does not include the file."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from minivllm.errors import BadInput
from minivllm.models.load.names import StoredTensor, with_model_names
from minivllm.platform.untrusted import (
    MAX_TOKENIZER,
    MIB,
    named,
    open_file,
    parse_json,
    read_bytes,
    read_object,
)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TOKENIZER, VOCAB, MERGES = "tokenizer.json", "vocab.json", "merges.txt"
GENERATION = "generation_config.json"
_MAX_HEADER = 32 * MIB  # a model of 100,000 tensors in one file has 15 MiB
_MAX_INDEX = 32 * MIB
_SAMPLE = 4096  # bytes of each tensor that enter the fingerprint
_ITEM_SIZE = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}
_AGAIN = "the file is damaged or its download was cut short; fetch it again"
_WHOLE = "download the checkpoint again"


@dataclass(frozen=True)
class Header:
    """The header of a .safetensors file."""

    tensors: dict[str, StoredTensor]  # by their names in the file
    metadata: Any  # as JSON, unchecked
    raw: bytes  # with its length


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of one folder, by the model's names."""

    folder: Path
    files: tuple[Path, ...]
    tensors: dict[str, StoredTensor]
    unlisted: frozenset[str] = frozenset()  # names that the index lacks, if there is one
    warnings: tuple[str, ...] = ()

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read the index and every header; no weight.

        With an index, the index says which file a tensor is read from. Without one, or where it
        lists other files, `model.safetensors` is the whole checkpoint, as for transformers; or else
        all .safetensors files together are.

        Raises:
            BadInput: a file is missing, unreadable or shorter than its header says, or does not
                hold what the index says.
        """
        index, warnings = _read_index(folder)
        files = tuple(folder / name for name in sorted(set(index.values()))) or _weight_files(
            folder
        )
        held: dict[str, dict[str, StoredTensor]] = {}
        for file in files:
            for name, tensor in _read_header(file).items():
                held.setdefault(name, {})[file.name] = tensor
        for name, file_name in index.items():
            if file_name not in (holders := held.get(name, {})):
                other = f" ({' and '.join(holders)} does)" if holders else ""
                raise BadInput(
                    f"{folder / INDEX} says that {file_name} holds tensor {name}, which it does "
                    f"not{other}: {_WHOLE}"
                )
        for name, holders in held.items():
            if name not in index and len(holders) > 1:
                raise BadInput(
                    f"{folder}: tensor {name} is in {' and '.join(holders)}: remove the file "
                    "that is not the model's"
                )
        tensors = with_model_names(
            {name: where[index.get(name, next(iter(where)))] for name, where in held.items()}
        )
        unlisted = {name for name, tensor in tensors.items() if index and tensor.name not in index}
        return cls(folder, files, tensors, frozenset(unlisted), warnings)

    def file_that_holds(self, name: str) -> Path | None:
        """A .safetensors file that the index does not list and that holds the tensor."""
        others = sorted({*self.folder.glob("*.safetensors")} - {*self.files})
        return next((file for file in others if _holds(file, name)), None)

    def fingerprint(self) -> str:
        """SHA-256 over config.json, each file's size and header, and the first 4 KiB of every
        tensor; and over the files that decide prompts and the ends of answers: the tokenizer
        (tokenizer.json, or else vocab.json and merges.txt) and generation_config.json.

        Not covered: tensors beyond their first 4 KiB, and the names of special tokens and the chat
        template (tokenizer_config.json, special_tokens_map.json, added_tokens.json,
        chat_template.jinja)."""
        digest = hashlib.sha256()
        tokenizer = next(
            (names for names in ((TOKENIZER,), (VOCAB, MERGES)) if self._has(*names)), ()
        )
        for name in ("config.json", *tokenizer, *((GENERATION,) if self._has(GENERATION) else ())):
            digest.update(read_bytes(self.folder / name, MAX_TOKENIZER, str(self.folder / name)))
        for file in self.files:
            with open_file(file, str(file)) as stream:
                digest.update(f"{file.name}:{os.fstat(stream.fileno()).st_size}".encode())
                start = 8 + int.from_bytes(stream.read(8), "little")
                stream.seek(0)
                digest.update(stream.read(start))
                for tensor in self.tensors.values():
                    if tensor.file == file:
                        stream.seek(tensor.begin)
                        digest.update(stream.read(min(_SAMPLE, tensor.end - tensor.begin)))
        return digest.hexdigest()

    def _has(self, *names: str) -> bool:
        return all((self.folder / name).exists() for name in names)


def _holds(file: Path, name: str) -> bool:
    """Whether a file outside of the checkpoint has a tensor; False if the file is unreadable."""
    try:
        return name in with_model_names(_read_header(file))
    except BadInput:
        return False


def sample(tensor: StoredTensor, pieces: int = 64) -> bytes:
    """Some bytes of a tensor: `pieces` of 256, evenly spread; all bytes of a smaller tensor."""
    size = tensor.end - tensor.begin
    with open_file(tensor.file, str(tensor.file)) as stream:
        if size <= pieces * 256:
            stream.seek(tensor.begin)
            return stream.read(size)
        parts = []
        for piece in range(pieces):
            stream.seek(tensor.begin + (size - 256) * piece // (pieces - 1))
            parts.append(stream.read(256))
        return b"".join(parts)


def shard_name(number: int, count: int) -> str:
    """The name of a .safetensors file, counted from 1, among so many of a checkpoint."""
    return SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def write_index(folder: Path, weight_map: Mapping[str, str], total: int) -> None:
    """Write the index of a checkpoint of several files: the file of each tensor, and the bytes of
    all."""
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def share(file: Path) -> None:
    """Give a file of safetensors' writer, which makes private ones, the permissions of the others
    in its new folder."""
    file.chmod(file.parent.stat().st_mode & 0o666)


def _read_index(folder: Path) -> tuple[dict[str, str], tuple[str, ...]]:
    """File name by tensor name, where every file exists; and a warning if a single file is read in
    place of the listed ones. Empty without an index."""
    index = folder / INDEX
    if not named(index):
        return {}, ()
    weight_map = read_object(index, str(index), _WHOLE, limit=_MAX_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadInput(f"{index} has no weight_map: {_WHOLE}")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise BadInput(
                f"{index}: tensor {name} is in {file_name!r}, which is no file name: {_WHOLE}"
            )
    if named(folder / SINGLE) and SINGLE not in weight_map.values():
        warning = (
            f"{folder}: {SINGLE} is read, and not the files that {INDEX} lists: remove what is "
            "not the model's"
        )
        return {}, (warning,)
    gone = {name: file for name, file in weight_map.items() if not os.path.exists(folder / file)}
    if gone:
        name, file_name = next(iter(gone.items()))
        raise BadInput(
            f"{index} names {file_name} (for tensor {name}), which {folder} lacks "
            f"({len(set(gone.values()))} missing): {_WHOLE}"
        )
    return weight_map, ()


def _weight_files(folder: Path) -> tuple[Path, ...]:
    """The .safetensors files of a folder without an index."""
    if named(folder / SINGLE):
        return (folder / SINGLE,)
    files = tuple(sorted(folder.glob("*.safetensors")))
    if files:
        return files
    if any(any(folder.glob(pattern)) for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt")):
        raise BadInput(
            f"{folder} holds pickled weights (.bin, .pt), which are not loaded because they can "
            f"run code: convert them with python run.py task=convert model.path={folder} "
            "task.output=NEW_FOLDER"
        )
    raise BadInput(
        f"{folder} has no .safetensors file: give a folder with a checkpoint, or "
        "model.weights=random"
    )


def _read_header(file: Path) -> dict[str, StoredTensor]:
    return read_header(file).tensors


def read_header(file: Path) -> Header:
    """The header of a .safetensors file, checked against the file's length.

    Raises:
        BadInput: the file is missing or unreadable, or its length is not what its header says.
    """
    try:
        with open_file(file, str(file), _AGAIN) as stream:
            size = os.fstat(stream.fileno()).st_size
            raw = _raw_header(stream, size)
        header = parse_json(
            raw[8:], f"{file} is not a readable safetensors file: its header", _AGAIN
        )
        if not isinstance(header, dict):
            raise ValueError("its header is not a JSON object")
        metadata = header.pop("__metadata__", None)
        held = {name: _stored(file, name, entry, len(raw)) for name, entry in header.items()}
        end = _check_layout(held, len(raw))
    except BadInput:
        raise
    except (OSError, ValueError) as error:
        raise BadInput(f"{file} is not a readable safetensors file ({error}): {_AGAIN}") from None
    if end != size:
        cut = next((f"; tensor {name} is cut off" for name, t in held.items() if t.end > size), "")
        raise BadInput(f"{file} has {size} bytes where its header says {end}{cut}: {_AGAIN}")
    return Header(held, metadata, raw)


def _raw_header(stream: BinaryIO, size: int) -> bytes:
    """The header with its length before it."""
    prefix = stream.read(8)
    length = int.from_bytes(prefix, "little")
    if not 2 <= length <= min(_MAX_HEADER, size - 8):
        raise ValueError(f"header length {length} in a file of {size} bytes")
    return prefix + stream.read(length)


def _stored(file: Path, name: str, entry: Any, start: int) -> StoredTensor:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]}:
            sizes = (*shape, begin, end)
        case _:
            raise ValueError(f"tensor {name} has no dtype, shape and data_offsets")
    if not all(type(n) is int and 0 <= n < 1 << 63 for n in sizes) or begin > end:
        raise ValueError(f"tensor {name} has a shape or offsets that cannot be")
    item = _ITEM_SIZE.get(dtype)
    if item is not None and end - begin != math.prod(shape) * item:
        raise ValueError(f"tensor {name} is {dtype}{shape} in {end - begin} bytes")
    return StoredTensor(file, name, dtype, tuple(shape), start + begin, start + end)


def _check_layout(tensors: dict[str, StoredTensor], start: int) -> int:
    """The end of the tensors, which follow each other without gaps, as the format demands."""
    at = start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if tensor.begin != at:
            raise ValueError(
                f"tensor {name} begins at byte {tensor.begin}, where byte {at} is next"
            )
        at = tensor.end
    return at
