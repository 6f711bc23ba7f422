"""The protocol of quantisation methods, and what the methods share."""

from __future__ import annotations

from copy import copy
from typing import Protocol, Self

import torch
from torch import Tensor, nn

from minivllm.kernels.context import BuildContext
from minivllm.kernels.cpu.library import Kernels
from minivllm.quant.options import PlainQuantOptions, QuantizerOptions

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class QuantMethod(Protocol):
    """How the linear layers of a model are stored and multiplied.

    The embedding is not quantised. The parameters and buffers of a packed module are all its
    memory. A method that also derives from `Method` gets the C++ kernels in use; another is used as
    it is."""

    @property
    def name(self) -> str:
        """The method's name in records and messages."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations, and of every weight that is not quantised."""

    @property
    def skip(self) -> tuple[str, ...]:
        """Parts of the names of layers that are not quantised."""

    def quantizes(self, layer_name: str) -> bool:
        """Whether pack() gets the weight of this layer, or of "lm_head"; other layers become plain
        ones."""

    def pack(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        """Make a linear layer from its weight.

        Args:
            weight: [out, in] in the compute dtype on its final device. The caller keeps no copy,
                but for a head that shares the embedding's weight: it must not be written to.
            bias: [out] or None.

        Returns:
            A module whose forward takes [rows, in] to [rows, out] in the input's dtype.
        """


class Method(PlainQuantOptions):
    """What all methods share: their options, and the C++ kernels in use."""

    kernels: Kernels | None = None  # for the layers; see `within`
    skip: tuple[str, ...] = ()
    dtype: torch.dtype  # type: ignore[assignment]  # the one that the option names

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "dtype", DTYPES[str(self.dtype)])

    def within(self, context: BuildContext) -> Self:
        """A copy that packs layers for the kernels of one engine."""
        copied = copy(self)
        copied.kernels = context.kernels
        return copied


class Quantizer(Method, QuantizerOptions):  # type: ignore[misc]  # see Method.dtype
    """What the methods that quantise share: which layers they leave alone."""

    name = "none"

    def quantizes(self, layer_name: str) -> bool:
        """Whether no entry of `skip` is part of the name, and the layer is not the head or
        `lm_head` is set."""
        is_eligible = self.lm_head or layer_name != "lm_head"
        return is_eligible and not any(part in layer_name for part in self.skip)


def frozen(tensor: Tensor) -> nn.Parameter:
    """The tensor as a parameter that takes no gradient."""
    return nn.Parameter(tensor, requires_grad=False)
