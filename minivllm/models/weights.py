"""Where weights come from: safetensors files, or a seed."""

from __future__ import annotations

import zlib
from typing import Any, Protocol

import torch
from torch import Tensor

from minivllm.errors import BadInput
from minivllm.models.checkpoint import Checkpoint, StoredTensor

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_KNOWN_BUFFERS = (
    "rotary_emb.inv_freq",
    "masked_bias",
    "attn.bias",
)  # old checkpoints carry them; not weights
_PERIOD = 4_194_301  # values of the random block; a prime, so that no two rows start at the same place


class WeightSource(Protocol):
    """Gives a model its weights, by their name in the checkpoint."""

    def check(self, shapes: dict[str, tuple[int, ...]], tied_head: bool) -> None:
        """Raises BadInput unless exactly these tensors are there, in these shapes."""

    def fill(self, name: str, out: Tensor) -> None:
        """Write the tensor into `out`, converting to its dtype."""


class CheckpointWeights:
    """Weights from safetensors files."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    def check(self, shapes: dict[str, tuple[int, ...]], tied_head: bool) -> None:
        """See WeightSource."""
        found, folder = self.checkpoint.tensors, self.checkpoint.folder
        missing = [name for name in shapes if name not in found]
        if missing:
            raise BadInput(
                f"{folder} lacks tensor {missing[0]} ({len(missing)} missing): "
                "config.json and weights do not belong together, or a file is missing"
            )
        for name, shape in shapes.items():
            stored = found[name]
            if stored.shape != shape:
                raise BadInput(
                    f"{stored.file}: tensor {name} has shape {list(stored.shape)} where config.json asks for "
                    f"{list(shape)}: config.json and weights do not belong together"
                )
            if stored.dtype not in _DTYPES:
                raise BadInput(
                    f"{stored.file}: tensor {name} is stored as {stored.dtype}; only {', '.join(_DTYPES)} are read: "
                    "use the 16-bit checkpoint"
                )
        # A tied head is often saved a second time; it is the embedding, so it is not read.
        ignored = ("lm_head.weight",) if tied_head else ()
        extra = [
            name
            for name in found
            if name not in shapes and not name.endswith(_KNOWN_BUFFERS) and name not in ignored
        ]
        if extra:
            raise BadInput(
                f"{found[extra[0]].file}: tensor {extra[0]} ({len(extra)} such) has no place in the "
                "architecture of config.json: they do not belong together"
            )

    def fill(self, name: str, out: Tensor) -> None:
        """See WeightSource."""
        stored = self.checkpoint.tensors[name]
        if out.device.type == "cpu" and out.dtype == _DTYPES[stored.dtype] and out.is_contiguous():
            _read_into(stored, name, out)
            return
        staged = torch.empty(stored.shape, dtype=_DTYPES[stored.dtype])
        _read_into(stored, name, staged)
        out.copy_(staged)


class RandomWeights:
    """Seeded weights from normal(0, 0.02); norms are ones.

    All tensors are cut, each from its own offset, out of one block of normal values drawn on the CPU: that is
    as fast as copying, and the same model on every device and in every dtype, up to rounding.
    """

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.block = torch.empty(_PERIOD).normal_(0.0, 0.02, generator=generator)

    def check(self, shapes: dict[str, tuple[int, ...]], tied_head: bool) -> None:
        """Nothing can be wrong."""

    def fill(self, name: str, out: Tensor) -> None:
        """See WeightSource."""
        if name.endswith("norm.weight"):
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


def _read_into(stored: StoredTensor, name: str, out: Tensor) -> None:
    target: Any = out.view(-1).view(torch.uint8).numpy()
    view = memoryview(target)
    with stored.file.open("rb", buffering=0) as stream:
        stream.seek(stored.begin)
        done = 0
        while done < len(view):
            count = stream.readinto(view[done:])
            if not count:
                raise BadInput(
                    f"{stored.file}: tensor {name} ends early: the file changed, or its disk failed"
                )
            done += count
