"""The weights of a GGUF file, converted to the compute dtype while they are read."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from minivllm.models.load.gguf.blocks import dequantized
from minivllm.models.load.gguf.checkpoint import GGUFCheckpoint, GGUFTensor
from minivllm.models.load.gguf.formats import BY_NAME, FLOATS, QUANTIZED
from minivllm.models.load.names import StoredTensor
from minivllm.models.load.weights import CheckpointWeights, Progress, read_into

_VALUES = 1 << 20  # converted at once: their float32 temporaries stay in a processor's cache


class GGUFWeights(CheckpointWeights):
    """Weights from a GGUF file.

    Blocks become float32, equal to those of the `gguf` package, and are rounded to the compute
    dtype. About `_VALUES` values are converted at a time (whole rows, and whole heads where these
    are reordered).

    Args:
        checkpoint: the file.
        progress: see CheckpointWeights.
    """

    formats = (*FLOATS, *QUANTIZED)
    described_by = "its metadata"

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


def open_weights(path: Path, progress: Progress | None) -> GGUFWeights:
    """The weights of a file. Raises BadInput, see `GGUFCheckpoint.open`."""
    checkpoint = GGUFCheckpoint.open(path)
    reader = GGUFWeights(checkpoint, progress)
    reader.stored_bytes = checkpoint.stored_bytes()
    return reader
