"""The protocols of quantisation methods, and of formats in which checkpoints store layers; and what
the methods share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from minivllm.kernels.cpu.library import Kernels
from minivllm.kernels.device import BuildContext
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
    dtype: torch.dtype  # the one that the option names

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "dtype", DTYPES[str(self.dtype)])

    def within(self, context: BuildContext) -> Self:
        """A copy that packs layers for the kernels of one engine."""
        copied = copy(self)
        copied.kernels = context.kernels
        return copied


class Quantizer(Method, QuantizerOptions):
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


def kernel_name(linear: nn.Module) -> str:
    """The kernel that a linear layer multiplies with: its `kernel_name`, or its class."""
    return str(getattr(linear, "kernel_name", type(linear).__name__))


def matrix_dtype(linear: nn.Module) -> str | None:
    """The dtype of a linear layer's products: its `matrix_dtype`; None is that of the
    activations."""
    dtype: str | None = getattr(linear, "matrix_dtype", None)
    return dtype


def as_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales that are not negative, float32, in the dtype that they are stored in, above 0.

    Below the normal numbers of float16 they are rounded up: rounded down, the largest weight would
    need a larger integer than there is; clamped there (6.1e-5), small weights would vanish."""
    least = torch.finfo(dtype).tiny
    if dtype is torch.float16:
        step = 2.0**-24  # between its subnormal numbers
        raised = (scale / step).ceil_().clamp_(min=1) * step
        scale = torch.where(scale < least, raised, scale)
        least = step
    return scale.clamp(min=least).to(dtype)


class RowScaled:
    """A base class, beside Quantizer, of methods with one scale for each output, which goes by the
    largest weight of its row.

    Attributes:
        over_ranks: the largest values of rows [out, 1] of which this process has a part of the
            inputs, from those of that part; None: it has all inputs.
    """

    over_ranks: Callable[[Tensor], Tensor] | None = None

    def largest(self, weight: Tensor) -> Tensor:
        """The largest magnitude of each row of a weight [out, in]: [out, 1], in its dtype."""
        largest = weight.abs().amax(1, keepdim=True)
        return largest if self.over_ranks is None else self.over_ranks(largest)


# Shapes of a layer's stored tensors, None for any shape. A name is what follows the layer's own
# name: "weight", "qweight", ...
Shapes = dict[str, tuple[int, ...] | None]


class StoredLayer(NamedTuple):
    """One linear layer as it is stored, in parts that are stacked along the rows."""

    parts: Sequence[Mapping[str, Tensor]]  # the tensors of each by name, on the layer's device
    rows: Sequence[int]  # of each part
    columns: int  # number of inputs
    bias: Tensor | None  # [sum of rows]


class StoredFormat(Protocol):
    """How a checkpoint stores its quantised layers.

    A format without a kernel has `weight` in place of `linear`, see `Converted`."""

    marker: str  # the tensor that every quantised layer has
    names: tuple[str, ...]  # of the tensors that a quantised layer may have

    def shapes(self, rows: int, columns: int) -> Shapes:
        """The tensors that a layer [rows, columns] must have."""

    def linear(self, layer: StoredLayer) -> nn.Module:
        """The module that multiplies with a layer. Raises BadInput where what is stored cannot be
        computed with."""
