"""A file of packed weights: a .safetensors file with a digest of each tensor and of its header.

The header's metadata has one JSON object: the identity of the weights, what else the model needs,
and the digest (XXH3, 128 bits) of every tensor. A last tensor is the digest of the header. So every
byte is checked when a file is opened: it finds damage, not an attacker, who could as well change
the programs beside it.

Weights are mapped where the system maps files in pages of 2 MB, and otherwise read into memory that
asks for such pages, since a weight that is read from end to end for each token needs 512 times
fewer of them. That memory is one piece: with one for each tensor, both ends of each would lie in
pages of 4 KB."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from minivllm.errors import BadInput
from minivllm.kernels.cpu.chunks import new_memory
from minivllm.models.load.checkpoint import Header, read_header
from minivllm.models.load.names import StoredTensor

METADATA, DIGEST = "minivllm_packed", "minivllm_digest"  # a key and a tensor
_DTYPES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
ALIGNED = 64  # bytes; tensors that begin elsewhere are copied
_CHUNK = 1 << 20  # bytes that are read and digested at a time: they stay in the processor's cache
_POPULATE_READ = 22  # of madvise, Linux 5.14
# Share of a mapping in pages of 2 MB from which on it is used: with 0.8, a step of Qwen3-0.6B in
# bfloat16 took no longer than with all memory in such pages; with 0, a tenth longer.
_MAPPED = 0.5
_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_HUGE = 1 << 21


def write_packed(
    path: Path, content: Mapping[str, Any], tensors: Mapping[str, Tensor], last: Collection[str]
) -> None:
    """Write a file.

    Args:
        path: of the file.
        content: JSON beside the tensors.
        tensors: by name, on the CPU and contiguous, of dtypes that `can_write` accepts.
        last: tensors that lie at the end, see `PackedFile.load`.
    """
    order = sorted(tensors, key=lambda name: (name in last, tensors[name].nbytes % ALIGNED != 0))
    views = {name: memoryview(_bytes(tensors[name])) for name in order}
    digests = {name: xxhash.xxh3_128_hexdigest(view) for name, view in views.items()}
    entries: dict[str, Any] = {}
    at = 0
    for name in order:
        entries[name] = {
            "dtype": _NAMES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [at, at + len(views[name])],
        }
        at += len(views[name])
    entries[DIGEST] = {"dtype": "U8", "shape": [16], "data_offsets": [at, at + 16]}
    metadata = {METADATA: json.dumps({**content, "digests": digests})}
    header = json.dumps({"__metadata__": metadata, **entries}).encode()
    header += b" " * (-(len(header) + 8) % mmap.PAGESIZE)
    raw = len(header).to_bytes(8, "little") + header
    with path.open("wb", buffering=0) as file:
        _write(file, (raw, *views.values(), xxhash.xxh3_128_digest(raw)))


def can_write(tensor: Tensor) -> bool:
    """Whether `write_packed` takes a tensor."""
    is_plain = tensor.layout is torch.strided and tensor.device.type == "cpu"
    return is_plain and tensor.dtype in _NAMES and tensor.is_contiguous()


def _write(file: FileIO, pieces: Iterable[Any]) -> None:
    """Write bytes, in calls that begin and end at multiples of 2 MB: so the system can keep the
    file in pages of that size."""
    buffer, used = memoryview(bytearray(4 * _HUGE)), 0
    for piece in pieces:
        left = memoryview(piece)
        while left:
            count = min(len(left), len(buffer) - used)
            buffer[used : used + count] = left[:count]
            left, used = left[count:], used + count
            if used == len(buffer):
                _write_all(file, buffer)
                used = 0
    _write_all(file, buffer[:used])


def _write_all(file: FileIO, view: memoryview) -> None:
    while view:
        view = view[file.write(view) :]


def _bytes(tensor: Tensor) -> Any:
    """The bytes of a contiguous tensor, as a NumPy array that shares its memory."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


@dataclass(frozen=True)
class PackedFile:
    """A file whose header is whole. The tensors are checked when they are loaded."""

    path: Path
    header: Header
    content: dict[str, Any]
    digests: dict[str, str]

    @classmethod
    def open(cls, path: Path) -> PackedFile:
        """Read the header.

        Raises:
            BadInput: the file is damaged or is none of these.
        """
        header = read_header(path)
        digest = header.tensors.pop(DIGEST, None)
        if digest is None or digest.end - digest.begin != 16:
            raise BadInput(f"{path} has no digest")
        if _range(path, digest.begin, digest.end) != xxhash.xxh3_128_digest(header.raw):
            raise BadInput(f"{path}: the header is not the one that was written")
        content = json.loads(header.metadata[METADATA])
        return cls(path, header, content, content.pop("digests"))

    def load(self, last: Collection[str], advise: Callable[[Tensor], object]) -> dict[str, Tensor]:
        """All tensors, by name.

        Args:
            last: tensors at the end of the file of which a step reads some rows: they are mapped,
                and only pages that are read take memory.
            advise: asks for pages of 2 MB for a tensor.

        Raises:
            BadInput: a tensor is not the one that was written, or cannot be read.
        """
        tensors = self.header.tensors
        rest = {name: stored for name, stored in tensors.items() if name not in last}
        begin = min((stored.begin for stored in rest.values()), default=0)
        end = max((stored.end for stored in rest.values()), default=0)
        try:
            mapped = map_range(self.path, begin, end)
            advise(mapped)
            if in_large_pages(mapped):
                found = {name: _part(mapped, begin, stored) for name, stored in rest.items()}
                self._each(found, lambda name: xxhash.xxh3_128_hexdigest(_bytes(found[name])))
            else:
                del mapped  # else the process had the bytes twice
                read = new_memory(max(1, end - begin), advise)
                memory = torch.frombuffer(read, dtype=torch.uint8)
                found = {name: _part(memory, begin, stored) for name, stored in rest.items()}
                self._each(found, lambda name: _digest(self.path, rest[name], _bytes(found[name])))
            for name in last:
                found[name] = self._looked_up(tensors[name])
        except (OSError, ValueError) as error:
            raise BadInput(f"{self.path} cannot be read: {error}") from None
        return found

    def _each(self, names: Collection[str], digest: Callable[[str], str]) -> None:
        """Compare the digests of tensors, in several threads."""
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            for name, found in zip(names, pool.map(digest, names), strict=True):
                self._check(name, found)

    def _check(self, name: str, digest: str) -> None:
        if digest != self.digests[name]:
            raise BadInput(f"{self.path}: tensor {name} is not the one that was written")

    def _looked_up(self, stored: StoredTensor) -> Tensor:
        """A tensor of which some rows are read, mapped in small pages after a check that does not
        map it."""
        self._check(stored.name, _digest(self.path, stored))
        mapped = map_range(self.path, stored.begin, stored.end, whole=False)
        return _part(mapped, stored.begin, stored)


def map_range(path: Path, begin: int, end: int, whole: bool = True) -> Tensor:
    """Bytes [begin, end) of a file as uint8, mapped: writing to the tensor does not change the
    file.

    Args:
        path: of the file.
        begin, end: a range of the file.
        whole: read all of it, in pages of 2 MB where the system can; else only what is used, in
            small pages.
    """
    start = begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size < end:
            raise OSError("it ends early")
        mapped = mmap.mmap(file.fileno(), end - start, access=mmap.ACCESS_COPY, offset=start)
    for advice in ("MADV_HUGEPAGE", _POPULATE_READ) if whole else ("MADV_NOHUGEPAGE",):
        number = getattr(mmap, advice, None) if isinstance(advice, str) else advice
        if number is not None and os.name == "posix":
            try:
                mapped.madvise(number)
            except OSError:  # an older system
                continue
    return torch.frombuffer(mapped, dtype=torch.uint8)[begin - start :]


def in_large_pages(mapped: Tensor) -> bool:
    """Whether a mapped file lies in pages of 2 MB, as far as memory of the process would."""
    try:
        if "[never]" in _THP.read_text():
            return True
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return False
    begin = mapped.data_ptr()
    end, inside, large = begin + mapped.nbytes, False, 0
    for line in lines:
        word, _, rest = line.partition(" ")
        if not word.endswith(":"):
            low, _, high = word.partition("-")
            inside = int(low, 16) < end and int(high, 16) > begin
        elif inside and word == "FilePmdMapped:":
            large += int(rest.split()[0]) * 1024
    return large >= _MAPPED * (mapped.nbytes - 2 * _HUGE)  # its ends fill no page


def _part(mapped: Tensor, begin: int, stored: StoredTensor) -> Tensor:
    """A tensor within a mapping that begins at byte `begin` of the file."""
    raw = mapped[stored.begin - begin : stored.end - begin]
    if stored.begin % ALIGNED:
        raw = raw.clone()
    return raw.view(_DTYPES[stored.dtype]).view(stored.shape)


def _digest(path: Path, stored: StoredTensor, out: Any = None) -> str:
    """The digest of a tensor's bytes, which are read into `out` where it is given."""
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_CHUNK)) if out is None else memoryview(out)
    with path.open("rb", buffering=0) as file:
        file.seek(stored.begin)
        done, total = 0, stored.end - stored.begin
        while done < total:
            start = 0 if out is None else done
            piece = buffer[start : start + min(_CHUNK, total - done)]
            count = file.readinto(piece)
            if not count:
                raise OSError("it ends early")
            digest.update(piece[:count])
            done += count
    return digest.hexdigest()


def _range(path: Path, begin: int, end: int) -> bytes:
    with path.open("rb") as file:
        file.seek(begin)
        return file.read(end - begin)
