"""Sources of weights: safetensors files, or a seed."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Collection
from io import FileIO
from typing import Any, Protocol

import torch
from torch import Tensor

from minivllm.errors import BadInput
from minivllm.models.load.checkpoint import INDEX, Checkpoint, sample
from minivllm.models.load.names import StoredTensor
from minivllm.quant.base import QuantMethod, Shapes

# Called with (done, total), in bytes of a checkpoint or values of random weights.
Progress = Callable[[int, int], None]

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_STORED = {
    **_DTYPES,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
}
_KNOWN_BUFFERS = (
    "rotary_emb.inv_freq",
    "masked_bias",
    "attn.bias",
)  # in old checkpoints; not weights
_CHUNK = 8 * 1024 * 1024  # bytes read at once, and most memory of a tensor on its way to a device
VISION = "vision."  # prefix of tower and connector
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_NORM = re.compile(r"(norm\d*|ln_q)\.weight$")
# Values of the random block; a prime number, so that no two rows start at the same place.
_PERIOD = 4_194_301


class WeightSource(Protocol):
    """The weights of a model, by the model's names."""

    warnings: list[str]  # from `check`
    stored_bytes: dict[str, int]  # of a GGUF file, by its formats

    def check(self, shapes: Shapes, tied_head: bool, as_stored: Collection[str] = ()) -> None:
        """Raises BadInput unless the source has exactly these tensors, in these shapes (None: any
        shape).

        All must be floating point except `as_stored`, which are read in their stored dtype."""

    def fill(self, name: str, out: Tensor) -> None:
        """Write the tensor into `out`, converted to its dtype."""

    def method(self, layer: str, quant: QuantMethod) -> QuantMethod:
        """How a linear layer is stored, where `quant` is the method of all."""


class LoadTransform(Protocol):
    """Changes a model while it is loaded."""

    @property
    def config(self) -> dict[str, Any]:
        """config.json of the model that comes out."""

    def weights(self, source: WeightSource, whole: Shapes) -> WeightSource:
        """The weights of the model that comes out.

        Args:
            source: of the whole model.
            whole: the shapes of the whole model's tensors.
        """


class _Reporting:
    """Counts and reports the progress."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress, self._done, self._total = progress, 0, 0
        self.warnings: list[str] = []
        self.stored_bytes: dict[str, int] = {}

    def method(self, layer: str, quant: QuantMethod) -> QuantMethod:
        return quant

    def _advance(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total)


class CheckpointWeights(_Reporting):
    """Weights from safetensors files.

    Args:
        checkpoint: has the files.
        progress: called with the bytes read so far, and those of all checked tensors.
    """

    formats: tuple[str, ...] = tuple(_DTYPES)  # that a tensor of floats may have
    described_by = "config.json"

    def __init__(self, checkpoint: Checkpoint, progress: Progress | None = None) -> None:
        super().__init__(progress)
        self.checkpoint = checkpoint
        self._staging: Tensor | None = None  # uint8 [_CHUNK]

    def check(self, shapes: Shapes, tied_head: bool, as_stored: Collection[str] = ()) -> None:
        tensors = self.checkpoint.tensors
        # A tied head is often saved a second time. It equals the embedding, so it is not read.
        ignored = (_HEAD,) if tied_head else ()
        # Of a model with images whose text alone is served, the rest has no place.
        named = tensors[_EMBEDDING].name if _EMBEDDING in tensors else ""
        text_alone = "language_model." in named and not any(n.startswith(VISION) for n in shapes)
        extra = [
            name
            for name in tensors
            if name not in shapes
            and not name.endswith(_KNOWN_BUFFERS)
            and name not in ignored
            and not (text_alone and name.startswith(VISION))
        ]
        if unlisted := [name for name in extra if name in self.checkpoint.unlisted]:
            extra = [name for name in extra if name not in self.checkpoint.unlisted]
            self.warnings.append(
                f"{self.checkpoint.folder}: tensor {tensors[unlisted[0]].name} ({len(unlisted)} "
                "such) has no place in the architecture and is not listed in the index: not read"
            )
        if missing := [name for name in shapes if name not in tensors]:
            raise BadInput(self._lacks(missing, extra))
        for name, shape in shapes.items():
            stored = tensors[name]
            if shape is not None and stored.shape != shape:
                raise BadInput(
                    f"{stored.file}: tensor {stored.name} has shape {list(stored.shape)} where "
                    f"{self.described_by} asks for {list(shape)}: {self._mismatch}"
                )
            if stored.dtype not in self.formats and name not in as_stored:
                raise BadInput(
                    f"{stored.file}: tensor {stored.name} is stored as {stored.dtype}; only "
                    f"{', '.join(self.formats)} are read: use the 16-bit checkpoint"
                )
        if extra:
            first = tensors[extra[0]]
            raise BadInput(
                f"{first.file}: tensor {first.name} ({len(extra)} such) has no place in the "
                f"architecture of {self.described_by}: {self._mismatch}"
            )
        if tied_head and _HEAD in tensors and not self._same(_HEAD, _EMBEDDING):
            raise BadInput(
                f"{tensors[_HEAD].file}: tensor {_HEAD} is not {_EMBEDDING}, although config.json "
                "ties the two: set tie_word_embeddings to false there"
            )
        self._total = sum(tensors[name].end - tensors[name].begin for name in shapes)

    def _lacks(self, missing: list[str], extra: list[str]) -> str:
        what = f"{self.checkpoint.folder} lacks tensor {missing[0]} ({len(missing)} missing)"
        if (other := self.checkpoint.file_that_holds(missing[0])) is not None:
            return (
                f"{what}, which {other.name} holds: {INDEX} does not list that file; add it, or "
                "remove the index"
            )
        if missing == [_HEAD]:
            return (
                f"{what}: if the head is the embedding, set tie_word_embeddings to true in "
                "config.json; else a file is missing, or it is a base model, saved without its "
                "head"
            )
        instead = (
            f" and holds {self.checkpoint.tensors[extra[0]].name}, which has no place"
            if extra
            else ""
        )
        return f"{what}{instead}: {self._mismatch}, or a file is missing"

    @property
    def _mismatch(self) -> str:
        return f"{self.described_by} and weights do not belong together"

    def _same(self, name: str, other: str) -> bool:
        """Whether two tensors are equal in dtype, shape and a sample of their bytes."""
        one, two = (self.checkpoint.tensors[key] for key in (name, other))
        return (one.dtype, one.shape) == (two.dtype, two.shape) and sample(one) == sample(two)

    def fill(self, name: str, out: Tensor) -> None:
        """Values that lie as they are wanted go straight to their place."""
        stored = self.checkpoint.tensors[name]
        dtype = _STORED[stored.dtype]
        direct = out.device.type == "cpu" and out.dtype == dtype
        try:
            # It was a regular file when its header was read.
            with stored.file.open("rb", buffering=0) as stream:
                stream.seek(stored.begin)
                for part in out.view(-1).split(_CHUNK // dtype.itemsize):
                    size = part.numel() * dtype.itemsize
                    raw = part.view(torch.uint8) if direct else self._staged(size, out.device)
                    read_into(stream, raw)
                    if not direct:
                        part.copy_(raw.view(dtype))
                    self._advance(size)
        except OSError as error:
            raise self._unreadable(stored, error) from None

    def _unreadable(self, stored: StoredTensor, error: OSError) -> BadInput:
        return BadInput(
            f"{stored.file}: tensor {stored.name} cannot be read ({error}): the file changed, or "
            "its disk failed"
        )

    def _staged(self, size: int, device: torch.device) -> Tensor:
        """Host memory for bytes on their way to a device; pinned for a GPU."""
        if self._staging is None or size > len(self._staging):
            self._staging = torch.empty(
                max(size, _CHUNK), dtype=torch.uint8, pin_memory=device.type == "cuda"
            )
        return self._staging[:size]

    def read(self, name: str) -> Tensor:
        """The tensor as it is stored, also of integers, in host memory. Raises BadInput for an
        unknown dtype."""
        stored = self.checkpoint.tensors[name]
        if stored.dtype not in _STORED:
            raise BadInput(
                f"{stored.file}: tensor {stored.name} is stored as {stored.dtype}, which is not "
                "read"
            )
        out = torch.empty(stored.shape, dtype=_STORED[stored.dtype])
        self.fill(name, out)
        return out


class RandomWeights(_Reporting):
    """Seeded weights from normal(0, 0.02); norms are ones.

    All tensors are cut, each at its own offset, from one block of normal values drawn on the CPU:
    that is as fast as copying, and gives the same model on every device and in every dtype, up to
    rounding.

    Args:
        seed: seed of the block.
        progress: called with the values filled so far, and those of all tensors.
    """

    def __init__(self, seed: int, progress: Progress | None = None) -> None:
        super().__init__(progress)
        generator = torch.Generator().manual_seed(seed)
        self.block = torch.empty(_PERIOD).normal_(0.0, 0.02, generator=generator)

    def check(self, shapes: Shapes, tied_head: bool, as_stored: Collection[str] = ()) -> None:
        """Count the values. Random weights have any shape."""
        self._total = sum(math.prod(shape or ()) for shape in shapes.values())

    def fill(self, name: str, out: Tensor) -> None:
        self._advance(out.numel())
        if _NORM.search(name):
            out.fill_(1.0)
            return
        if self.block.dtype != out.dtype or self.block.device != out.device:
            self.block = self.block.to(device=out.device, dtype=out.dtype)
        flat = out.view(-1)
        done, offset = 0, zlib.crc32(name.encode()) % _PERIOD
        while done < flat.numel():
            piece = self.block[offset : offset + flat.numel() - done]
            flat[done : done + piece.numel()] = piece
            done, offset = done + piece.numel(), 0


def read_into(stream: FileIO, out: Tensor) -> None:
    """Read exactly the bytes of `out`. Raises OSError if the file ends before."""
    data: Any = out.numpy()
    view = memoryview(data)
    while view:
        count = stream.readinto(view)
        if not count:
            raise OSError("it ends early")
        view = view[count:]
