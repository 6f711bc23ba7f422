"""What a vision tower is, and the embeddings that a step carries in place of those of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minivllm.models.vision.inputs import ProcessedImage


class EmbeddedRows(NamedTuple):
    """The images' part of a step, which StepBatch carries as `inputs`."""

    rows: Tensor  # int64 [N], tokens of the step whose embeddings come from images
    # [N, hidden], or wider where a family adds more to later layers (see `VisionTower.width`).
    values: Tensor
    # int64 [3, T], rotary positions in time, height and width; None: those of the step.
    positions: Tensor | None = None

    def put(self, x: Tensor) -> Tensor:
        """The embeddings [T, hidden] of a step's tokens, with those of images in their places."""
        return x.index_copy(0, self.rows, self.values[:, : x.shape[1]]) if len(self.rows) else x


class VisionTower(nn.Module):
    """From pixels to embeddings: tower and connector of a family.

    Names of modules are those of the checkpoint after its "model."; its weights are torch's own
    modules in the compute dtype, whatever `quant` does to the language model.

    Args:
        config: config.json of the checkpoint.
    """

    width: int  # numbers of a row of the embeddings

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.config = config

    def encode(self, images: Sequence[ProcessedImage], levels: Tensor) -> list[Tensor]:
        """The embeddings of images, which are computed together.

        Args:
            images: of the family's processor.
            levels: float32 [3, 256], see ImageProcessor; on the tower's device.

        Returns:
            For each image [num_tokens, width] in the compute dtype.
        """
        raise NotImplementedError

    def flops(self, image: ProcessedImage) -> float:
        """Operations that `encode` does for an image."""
        raise NotImplementedError

    def working_bytes(self, most_tokens: int) -> int:
        """Memory that `encode` takes at its peak, but for the embeddings, however many images it is
        given of at most `most_tokens` embeddings each."""
        raise NotImplementedError

    @property
    def shapes(self) -> dict[str, tuple[int, ...] | None]:
        """The shapes of the checkpoint's tensors, by name."""
        return {f"vision.{name}": tuple(one.shape) for name, one in self.named_parameters()}

    def fill(
        self, read: Callable[[str, Tensor], None], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Replace weights on the meta device by those that `read` writes into a tensor, given its
        name."""
        for name, weight in list(self.named_parameters()):
            value = torch.empty(weight.shape, dtype=dtype, device=device)
            read(f"vision.{name}", value)
            path, _, leaf = name.rpartition(".")
            setattr(self.get_submodule(path), leaf, nn.Parameter(value, requires_grad=False))

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(weight.nbytes for weight in self.parameters())

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device


def normalised(pixels: Tensor, levels: Tensor, dtype: torch.dtype) -> Tensor:
    """Pixels uint8 [N, 3, ...] as the numbers that the tower takes, of the same shape.

    Args:
        pixels: on the device of `levels`.
        levels: float32 [3, 256].
        dtype: of the result.
    """
    shift = torch.arange(3, device=pixels.device).view(3, *[1] * (pixels.ndim - 2)) * 256
    return levels.to(dtype).view(-1)[pixels.long() + shift]
