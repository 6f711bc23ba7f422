"""What a quantisation method offers the loader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from minivllm.errors import BadInput

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class QuantMethod(Protocol):
    """How the linear layers of a model are stored and multiplied.

    Embedding and head are left alone. The parameters and buffers of a packed module are all its memory.
    """

    name: str
    dtype: torch.dtype  # of activations, and of every weight that is not quantised
    skip: tuple[str, ...]

    def quantizes(self, layer_name: str) -> bool:
        """Whether this layer's weight goes through pack(); the others become plain linear layers."""

    def pack(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        """Take over one linear layer's weight.

        Args:
            weight: [out, in] in the compute dtype on its final device; the caller keeps no copy.
            bias: [out] or None.

        Returns:
            A module whose forward takes [rows, in] to [rows, out] in the input's dtype.
        """


class Quantizer:
    """What the methods share: the compute dtype, and the layers to leave alone.

    Args:
        dtype: "bfloat16", "float16" or "float32".
        skip: layers to keep plain, by any part of their name, e.g. "layers.0." or "down_proj". Fused layers
            have one name: qkv_proj, gate_up_proj.
    """

    name = "none"

    def __init__(self, dtype: str, skip: Sequence[str] = ()) -> None:
        self.dtype = parse_dtype(dtype)
        if isinstance(skip, str) or not all(isinstance(part, str) and part for part in skip):
            raise BadInput(f"quant.skip={skip!r} must be a list of parts of layer names, e.g. [down_proj]")
        self.skip = tuple(skip)

    def quantizes(self, layer_name: str) -> bool:
        """Whether no entry of `skip` occurs in the name."""
        return not any(part in layer_name for part in self.skip)


def parse_dtype(dtype: str) -> torch.dtype:
    """The compute dtype of that name. Raises BadInput for any other."""
    if dtype not in DTYPES:
        raise BadInput(f"quant.dtype={dtype!r} must be one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def frozen(tensor: Tensor) -> nn.Parameter:
    """The tensor as a parameter that takes no gradient."""
    return nn.Parameter(tensor, requires_grad=False)
