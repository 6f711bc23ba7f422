"""What a quantisation method offers the loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minivllm.kernels.cpu.library import Kernels
from minivllm.quant.options import PlainQuantOptions, QuantizerOptions

SLICE = 8 * 1024 * 1024  # weights converted at a time, so that no layer exists whole in 16 bits
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Of a layer's stored tensors, None where any will do; names are those after the layer's own:
# "weight", "qweight", ...
Shapes = dict[str, tuple[int, ...] | None]


class QuantMethod(Protocol):
    """How the linear layers of a model are stored and multiplied.

    The embedding is left alone. The parameters and buffers of a packed module are all its memory.
    """

    @property
    def name(self) -> str:
        """What records and messages call the method."""

    @property
    def dtype(self) -> torch.dtype:
        """Of activations, and of every weight that is not quantised."""

    @property
    def skip(self) -> tuple[str, ...]:
        """Parts of the names of layers that are left alone."""

    # in C++, which layers may compute with; set before the first one is packed
    kernels: Kernels | None

    def quantizes(self, layer_name: str) -> bool:
        """Whether the weight of this layer, or of "lm_head", goes through pack(); others become
        plain ones."""

    def pack(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        """Take over one linear layer's weight.

        Args:
            weight: [out, in] in the compute dtype on its final device. The caller keeps no copy,
                but for a head that shares the embedding's weight: it must not be written to.
            bias: [out] or None.

        Returns:
            A module whose forward takes [rows, in] to [rows, out] in the input's dtype.
        """


class StoredFormat(Protocol):
    """How a checkpoint keeps the linear layers that it has quantised.

    One that no method computes with as it is stored has `weight` in place of `linear`, see
    `Converted`.
    """

    marker: str  # the tensor by which a quantised layer is recognised
    names: tuple[str, ...]  # of all tensors that a quantised layer may have

    def shapes(self, rows: int, columns: int) -> Shapes:
        """The tensors that a layer [rows, columns] must have."""

    def linear(
        self,
        parts: Sequence[Mapping[str, Tensor]],
        rows: Sequence[int],
        columns: int,
        bias: Tensor | None,
    ) -> nn.Module:
        """One layer out of the tensors of its parts, which lie one below the other.

        Args:
            parts: by name, on the layer's device.
            rows: of each part.
            columns: inputs.
            bias: [sum of rows] or None.

        Raises:
            BadInput: what is stored cannot be computed with.
        """


class Quantizer(QuantizerOptions):
    """What the methods share: their options, and which layers they leave alone."""

    name = "none"
    kernels: Kernels | None = None
    dtype: torch.dtype  # type: ignore[assignment]  # the one that the option names

    def __post_init__(self) -> None:
        super().__post_init__()
        use_torch_dtype(self)

    def quantizes(self, layer_name: str) -> bool:
        """Whether no entry of `skip` occurs in the name, and it is not the head or `lm_head` is
        set."""
        wanted = self.lm_head or layer_name != "lm_head"
        return wanted and not any(part in layer_name for part in self.skip)


def use_torch_dtype(method: PlainQuantOptions) -> None:
    """Put torch's dtype in place of its name."""
    object.__setattr__(method, "dtype", DTYPES[method.dtype])


def triton_products() -> ModuleType:
    """The Triton kernels for products with few rows; imported only where they are used."""
    from minivllm.quant.kernels import products

    return products


def frozen(tensor: Tensor) -> nn.Parameter:
    """The tensor as a parameter that takes no gradient."""
    return nn.Parameter(tensor, requires_grad=False)


def by_rows(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Some rows of each at a time: about SLICE numbers of the first, [rows, columns]."""
    step = max(1, SLICE // tensors[0].shape[1])
    return zip(*(tensor.split(step) for tensor in tensors), strict=True)


def converted_product(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    convert: Callable[[Tensor], Tensor] = lambda part: part,
) -> Tensor:
    """(x W^T) * scale, with W brought to the dtype of x some rows at a time.

    In float16 the scale, [out], meets the weight: sums without it may be more than 65,504.
    """
    narrow, parts = x.dtype is torch.float16, []
    for stored, factor in by_rows(weight, scale):
        part = convert(stored).to(x.dtype)
        parts.append(F.linear(x, part.mul_(factor[:, None]) if narrow else part))
    product = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    return product if narrow else product.mul_(scale)
