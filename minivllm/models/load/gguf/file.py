"""A GGUF file: its metadata and the places of its tensors, checked before a weight is read. Free of
torch.

The format is a header (magic, version, counts), keys with typed values, the tensors' names, shapes
and offsets, and their bytes (its specification lies in https://github.com/ggml-org/ggml). The
`gguf` package reads it, too, but takes a damaged length for a true one and may not end; so the file
is read here, and the package is what the tests compare with."""

from __future__ import annotations

import hashlib
import math
import os
import struct
from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import IntEnum
from io import BufferedReader
from pathlib import Path
from typing import Any

from minivllm.errors import BadInput
from minivllm.models.load.gguf.formats import FORMATS
from minivllm.models.load.gguf.parts import all_tensors, other_parts
from minivllm.models.load.names import StoredTensor
from minivllm.platform.untrusted import MIB, open_file, printable, size
from minivllm.platform.values import Values

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32  # of the tensors' bytes, where the file does not say another
_SAMPLE = 4096  # bytes of each tensor that enter the fingerprint
# Several times those of the largest published files.
_MOST_HEADER, _MOST_STRING = 256 * MIB, 4 * MIB
_MOST_KEYS, _MOST_TENSORS, _MOST_NAME, _MOST_DIMENSIONS = 1 << 16, 1 << 18, 1 << 10, 4
_MOST_SIDE, _MOST_ALIGNMENT = 1 << 31, 1 << 20
_MOST_VALUES = 1 << 21  # of an array that is read; the largest published have some 300,000
_AHEAD, _LENGTH = 1 << 20, struct.Struct("<Q")  # bytes that are read at once; a text's length
_AGAIN = "the file is damaged or its download was cut short; fetch it again"


class _Kind(IntEnum):
    """The types of metadata that are no numbers."""

    BOOL = 7
    STRING = 8
    ARRAY = 9


_FLOAT32 = 6
_NUMBERS = {
    **{0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", _FLOAT32: "<f", _Kind.BOOL: "<B"},
    **{10: "<Q", 11: "<q", 12: "<d"},
}


@dataclass(frozen=True)
class StoredArray:
    """The place of an array of metadata, which is read when it is needed."""

    kind: int
    count: int
    begin: int
    end: int

    def __repr__(self) -> str:
        return f"(an array of {self.count})"


class _Damaged(ValueError):
    """What is wrong with a file."""


@dataclass(frozen=True)
class GGUFFile:
    """The header of a file, or of all parts of a split model, whose first has the metadata."""

    path: Path
    metadata: dict[str, Any]  # numbers, flags, texts and StoredArrays by key
    tensors: dict[str, StoredTensor]  # by the file's names; shapes as torch has them
    data: int  # where the tensors' bytes begin
    others: tuple[GGUFFile, ...] = ()  # the further parts, whose tensors are among these

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Read the header, and those of the other parts of a split model; no weight.

        Raises:
            BadInput: the file cannot be read, is of another format or version, is damaged or cut
                off, has sizes that cannot be, or is a part of a split model that is not the first,
                or whose others are missing or of another model.
        """
        first = cls._open_one(path)
        others = tuple(cls._open_one(part) for part in other_parts(path, first.values))
        if not others:
            return first
        parts = {part.path: (part.metadata, part.tensors) for part in (first, *others)}
        return replace(first, tensors=all_tensors(parts), others=others)

    @classmethod
    def _open_one(cls, path: Path) -> GGUFFile:
        with open_file(path, str(path)) as stream:
            try:
                return cls._read(path, stream)
            except _Damaged as error:
                raise BadInput(f"{path} is not a readable GGUF file ({error}): {_AGAIN}") from None
            except OSError as error:
                raise BadInput(f"{path} cannot be read: {error.strerror or error}") from None

    @classmethod
    def _read(cls, path: Path, stream: BufferedReader) -> GGUFFile:
        total = os.fstat(stream.fileno()).st_size
        reader = _Reader(stream, total)
        if reader.take(4) != MAGIC:
            raise _Damaged("it does not begin with GGUF")
        _check_version(path, reader.number("<I"))
        tensor_count, key_count = reader.number("<Q"), reader.number("<Q")
        if tensor_count > _MOST_TENSORS or key_count > _MOST_KEYS:
            raise _Damaged(f"{tensor_count:,} tensors and {key_count:,} keys cannot be")
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = reader.text(_MOST_NAME)
            if key in metadata:
                raise _Damaged(f"key {printable(key)} is there twice")
            metadata[key] = reader.value(reader.number("<I"))
        values = Values(metadata, str(path))
        alignment = values.integer("general.alignment", _ALIGNMENT, high=_MOST_ALIGNMENT)
        if alignment & (alignment - 1):
            values.fail("general.alignment", "must be a power of two")
        infos = [reader.tensor(path) for _ in range(tensor_count)]
        data = -(-reader.at // alignment) * alignment
        tensors: dict[str, StoredTensor] = {}
        for info in infos:
            if info.name in tensors:
                raise _Damaged(f"tensor {info.name} is there twice")
            tensors[info.name] = info.moved(data)
        _check_layout(path, tensors, alignment, data, total)
        return cls(path, metadata, tensors, data)

    @property
    def values(self) -> Values:
        """The metadata, each value read with its type and range."""
        return Values(self.metadata, str(self.path))

    def texts(self, key: str) -> list[str] | None:
        """An array of texts; None where there is no such key. Raises BadInput for another value."""
        if (found := self._array(key)) is None:
            return None
        array, content = found
        if array.kind != _Kind.STRING:
            self.values.fail(key, "must be texts")
        texts, at = [], 0
        for _ in range(array.count):
            (length,) = struct.unpack_from("<Q", content, at)
            texts.append(content[at + 8 : at + 8 + length])
            at += 8 + length
        try:
            return [text.decode() for text in texts]
        except UnicodeDecodeError:
            raise BadInput(f"{self.path}: {key} holds what is not UTF-8: {_AGAIN}") from None

    def indices(self, key: str, texts: Collection[str]) -> dict[str, int]:
        """The places of some texts in an array, without reading the others; of those that it has.
        Raises BadInput for another value."""
        if (found := self._array(key)) is None or found[0].kind != _Kind.STRING:
            return {}
        content, at = found[1], 0
        stored = {text.encode(): text for text in texts if text.encode() in content}
        lengths, places = {*map(len, stored)}, {}
        for index in range(found[0].count if stored else 0):
            (length,) = struct.unpack_from("<Q", content, at)
            if length in lengths and (raw := content[at + 8 : at + 8 + length]) in stored:
                places[stored[raw]] = index
            at += 8 + length
        return places

    def numbers(self, key: str) -> list[Any] | None:
        """An array of numbers or flags; None where there is no such key. Raises BadInput for
        another value."""
        if (found := self._array(key)) is None:
            return None
        array, content = found
        if array.kind not in _NUMBERS:
            self.values.fail(key, "must be numbers")
        code = _NUMBERS[array.kind]
        return list(struct.unpack(f"<{array.count}{code[1]}", content))

    def _array(self, key: str) -> tuple[StoredArray, bytes] | None:
        array = self.metadata.get(key)
        if array is None:
            return None
        if not isinstance(array, StoredArray):
            self.values.fail(key, "must be an array")
        if array.count > _MOST_VALUES:
            raise BadInput(
                f"{self.path}: {key} has {array.count:,} values, more than any model: {_AGAIN}"
            )
        with open_file(self.path, str(self.path)) as stream:
            stream.seek(array.begin)
            content = stream.read(array.end - array.begin)
        if len(content) != array.end - array.begin:
            raise BadInput(f"{self.path} changed while it was read")
        return array, content

    def fingerprint(self) -> str:
        """SHA-256 over the size of each file, its header with the tokenizer, and the first 4 KiB of
        every tensor."""
        digest = hashlib.sha256()
        for part in (self, *self.others):
            with open_file(part.path, str(part.path)) as stream:
                digest.update(f"gguf:{os.fstat(stream.fileno()).st_size}:".encode())
                digest.update(stream.read(part.data))
                for tensor in self.tensors.values():
                    if tensor.file == part.path:
                        stream.seek(tensor.begin)
                        digest.update(stream.read(min(_SAMPLE, tensor.end - tensor.begin)))
        return digest.hexdigest()


def is_gguf(path: Path) -> bool:
    """Whether a path is a file that says that it is GGUF, by its name or its first bytes."""
    if not path.is_file():
        return False
    if path.suffix.lower() == ".gguf":
        return True
    try:
        with path.open("rb") as stream:
            return stream.read(4) == MAGIC
    except OSError:
        return False


@dataclass(frozen=True)
class _Info:
    """What the header says of a tensor."""

    path: Path
    name: str
    form: str
    shape: tuple[int, ...]
    offset: int
    length: int

    def moved(self, data: int) -> StoredTensor:
        """The tensor of a file whose data begin there."""
        begin = data + self.offset
        return StoredTensor(self.path, self.name, self.form, self.shape, begin, begin + self.length)


class _Reader:
    """Reads a header from its beginning, and never beyond the end of the file or of what a header
    may take."""

    def __init__(self, stream: BufferedReader, total: int) -> None:
        self._stream, self._end, self.at = stream, min(total, _MOST_HEADER), 0
        self._why = (
            "it ends within its header"
            if total <= _MOST_HEADER
            else f"its header is longer than {size(_MOST_HEADER)}"
        )

    def _advance(self, count: int) -> None:
        if count > self._end - self.at:
            raise _Damaged(self._why)
        self.at += count

    def take(self, count: int) -> bytes:
        """The next bytes."""
        self._advance(count)
        content = self._stream.read(count)
        if len(content) != count:
            raise _Damaged("it became shorter while it was read")
        return content

    def number(self, code: str) -> Any:
        """The next number, of a format of `struct`."""
        (number,) = struct.unpack(code, self.take(struct.calcsize(code)))
        return number

    def text(self, most: int = _MOST_STRING) -> str:
        """The next text."""
        length = self.number("<Q")
        if length > most:
            raise _Damaged(f"a text of {length:,} bytes cannot be")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise _Damaged("a text is not UTF-8") from None

    def value(self, kind: int) -> Any:
        """The next value of a type."""
        if kind == _Kind.STRING:
            return self.text()
        if kind == _Kind.ARRAY:
            return self._array()
        if kind not in _NUMBERS:
            raise _Damaged(f"metadata of type {kind} is unknown")
        number = self.number(_NUMBERS[kind])
        if kind == _FLOAT32:
            return shortest(number)
        return bool(number) if kind == _Kind.BOOL else number

    def _array(self) -> StoredArray:
        kind, count = self.number("<I"), self.number("<Q")
        begin = self.at
        if kind == _Kind.STRING:
            self._pass_texts(count)
        elif kind in _NUMBERS:
            self._advance(count * struct.calcsize(_NUMBERS[kind]))
            self._stream.seek(self.at)
        else:
            raise _Damaged(f"an array of type {kind} is unknown")
        return StoredArray(kind, count, begin, self.at)

    def _pass_texts(self, count: int) -> None:
        """Go past so many texts, each an 8-byte length and its bytes."""
        if count > self._end // 8:  # or it may take hours
            raise _Damaged(self._why)
        begin, ahead, at = self.at, b"", 0  # what was read ahead begins there in the file
        for _ in range(count):
            if at + 8 > len(ahead):
                begin, at = begin + at, 0
                self._stream.seek(begin)
                ahead = self._stream.read(_AHEAD)
            if at + 8 > len(ahead):
                raise _Damaged(self._why)
            (length,) = _LENGTH.unpack_from(ahead, at)
            at += 8 + length
            if begin + at > self._end:
                raise _Damaged(self._why)
        self.at = begin + at
        self._stream.seek(self.at)

    def tensor(self, path: Path) -> _Info:
        """The next tensor's name, shape, format and offset."""
        name = self.text(_MOST_NAME)
        shown = printable(name)
        dimensions = self.number("<I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise _Damaged(f"tensor {shown} has {dimensions} dimensions")
        sides = struct.unpack(f"<{dimensions}Q", self.take(8 * dimensions))
        number, offset = self.number("<I"), self.number("<Q")
        if number not in FORMATS:
            raise _Damaged(f"tensor {shown} is of format {number}, which is unknown")
        form = FORMATS[number]
        if not all(1 <= side <= _MOST_SIDE for side in sides) or sides[0] % form.values:
            raise _Damaged(f"tensor {shown} of {form.name} has the shape {[*sides[::-1]]}")
        length = math.prod(sides) // form.values * form.bytes
        return _Info(path, name, form.name, sides[::-1], offset, length)


def _check_version(path: Path, version: int) -> None:
    if version in _VERSIONS:
        return
    if version & 0xFFFF == 0:
        raise BadInput(
            f"{path} is written in big-endian order, which is not read: fetch the little-endian "
            "file"
        )
    raise BadInput(
        f"{path} is of version {version} of GGUF; read are {' and '.join(map(str, _VERSIONS))}: "
        "convert the model again"
    )


def _check_layout(
    path: Path, tensors: dict[str, StoredTensor], alignment: int, data: int, total: int
) -> None:
    """Reject tensors that overlap, begin anywhere, or end beyond the file."""
    at = data
    for tensor in sorted(tensors.values(), key=lambda one: (one.begin, one.end)):
        name = printable(tensor.name)
        if tensor.end > total:
            raise BadInput(
                f"{path} has {total} bytes where tensor {name} ends at {tensor.end}: {_AGAIN}"
            )
        if tensor.begin < at or tensor.begin % alignment:
            raise _Damaged(f"tensor {name} begins at byte {tensor.begin}, where it cannot")
        at = tensor.end


def shortest(number: float) -> float:
    """The number of the fewest digits that is this one in float32: 1e-6 and not 9.99999997e-07."""
    if not math.isfinite(number):
        return number
    raw = struct.pack("<f", number)
    texts = (f"{number:.{digits}g}" for digits in range(1, 10))
    return next((float(text) for text in texts if _is(float(text), raw)), number)


def _is(number: float, raw: bytes) -> bool:
    try:
        return struct.pack("<f", number) == raw
    except OverflowError:  # rounded up beyond the largest
        return False
