"""The weights of a GGUF file, converted to the compute dtype while they are read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from minivllm.errors import BadInput, install
from minivllm.models.load.gguf.blocks import dequantized
from minivllm.models.load.gguf.checkpoint import GGUFCheckpoint, GGUFTensor
from minivllm.models.load.gguf.formats import BY_NAME, BY_PACKAGE, READ
from minivllm.models.load.names import StoredTensor
from minivllm.models.load.weights import CheckpointWeights, Progress, read_into
from minivllm.quant.base import Shapes

_VALUES = 1 << 20  # converted at once: their float32 temporaries stay in a processor's cache
_NAMED = 3  # tensors that a message names


class GGUFWeights(CheckpointWeights):
    """Weights from a GGUF file.

    Blocks become float32, equal to those of the `gguf` package, and are rounded to the compute
    dtype. About `_VALUES` values are converted at a time (whole rows, and whole heads where these
    are reordered).

    Args:
        checkpoint: the file.
        progress: see CheckpointWeights.
    """

    formats = READ
    described_by = "its metadata"

    def check(self, shapes: Shapes, tied_head: bool, as_stored: Collection[str] = ()) -> None:
        """Raises BadInput too where tensors are of formats that are not read, or that need the
        package `gguf`, which is not installed; the message names both."""
        tensors, found = self.checkpoint.tensors, dict[str, dict[str, None]]()
        for name in shapes:
            if stored := tensors.get(name):
                found.setdefault(stored.dtype, {})[stored.name] = None
        of_file = f"{self.checkpoint.folder} stores"
        if unread := {form: names for form, names in found.items() if form not in READ}:
            raise BadInput(
                f"{of_file} {_shown(unread)}; only {', '.join(READ)} are read: use another "
                "quantisation of the model"
            )
        looked_up = {form: names for form, names in found.items() if form in BY_PACKAGE}
        if looked_up and find_spec("gguf") is None:
            raise BadInput(
                f"{of_file} {_shown(looked_up)}, which the package gguf converts: {install('gguf')}"
            )
        super().check(shapes, tied_head, as_stored)

    def fill(self, name: str, out: Tensor) -> None:
        stored = self.checkpoint.tensors[name]
        form = BY_NAME[stored.dtype]
        rows = out.view(-1, out.shape[-1] if out.dim() > 1 else 1)
        unit = self._rows_together(stored, rows) if out.dim() > 1 else len(rows)
        step = max(1, _VALUES // (rows.shape[1] * unit)) * unit
        try:
            with stored.file.open("rb", buffering=0) as stream:
                stream.seek(stored.begin)
                for part in rows.split(step):
                    raw = self._staged(part.numel() // form.values * form.bytes, out.device)
                    read_into(stream, raw)
                    self._convert(stored, raw.to(out.device), part)
                    self._advance(raw.numel())
        except OSError as error:
            raise self._unreadable(stored, error) from None

    def blocks(self, name: str) -> Tensor:
        """A matrix as it is stored, but with its rows as the model has them: uint8 [rows, bytes of
        a row], in host memory."""
        stored = self.checkpoint.tensors[name]
        rows = stored.shape[0]
        raw = torch.empty(rows, (stored.end - stored.begin) // rows, dtype=torch.uint8)
        try:
            with stored.file.open("rb", buffering=0) as stream:
                stream.seek(stored.begin)
                read_into(stream, raw.view(-1))
        except OSError as error:
            raise self._unreadable(stored, error) from None
        self._advance(raw.numel())
        if heads := stored.heads if isinstance(stored, GGUFTensor) else 0:
            raw = raw.view(heads, -1, 2, raw.shape[1]).transpose(1, 2).reshape(raw.shape)
        return raw

    @staticmethod
    def _rows_together(stored: StoredTensor, rows: Tensor) -> int:
        """Rows of a head, where a head's rows are reordered; else 1."""
        heads = stored.heads if isinstance(stored, GGUFTensor) else 0
        return len(rows) // heads if heads else 1

    def _convert(self, stored: StoredTensor, raw: Tensor, out: Tensor) -> None:
        """Write whole rows [n, columns] as the model has them from their stored bytes."""
        values = dequantized(raw, stored.dtype).view(out.shape)
        if isinstance(stored, GGUFTensor):
            if stored.has_one:
                values = values.float() - 1
            if stored.heads:  # rows of both halves of a head in turn
                half = stored.shape[0] // stored.heads // 2
                values = values.view(-1, half, 2, out.shape[1]).transpose(1, 2)
                out = out.view(-1, 2, half, out.shape[1])
        out.copy_(values)


def _shown(found: Mapping[str, Collection[str]]) -> str:
    """Tensors, of which a message names some of each format."""
    return "; ".join(
        f"{', '.join([*names][:_NAMED])}"
        f"{f' and {len(names) - _NAMED} more' if len(names) > _NAMED else ''} as {form}"
        for form, names in found.items()
    )


def open_weights(path: Path, progress: Progress | None) -> GGUFWeights:
    """The weights of a file. Raises BadInput, see `GGUFCheckpoint.open`."""
    checkpoint = GGUFCheckpoint.open(path)
    reader = GGUFWeights(checkpoint, progress)
    reader.stored_bytes = checkpoint.stored_bytes()
    return reader
