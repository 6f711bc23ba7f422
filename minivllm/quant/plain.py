"""No quantisation: linear layers in bfloat16, float16 or float32."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minivllm.kernels.cpu.library import Kernels
from minivllm.kernels.cpu.linear import Format, PackedLinear, PanelLinear, can_pack, panels_for
from minivllm.quant.base import Method, frozen

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Plain(Method):
    """Weights as they are, in the compute dtype."""

    @property
    def name(self) -> str:
        """The option's name."""
        return NAMES[self.dtype]

    def quantizes(self, layer_name: str) -> bool:
        return False

    def pack(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        return plain_linear(weight, bias, self.kernels)


class PlainLinear(nn.Module):
    """A linear layer on an unchanged weight; also the head that shares the embedding's weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = weight if isinstance(weight, nn.Parameter) else frozen(weight)
        self.bias = None if bias is None else frozen(bias)
        # With one row and a bfloat16 weight that is not reordered, torch's matrix-vector product
        # took 0.7 of the time of F.linear (the head of Qwen3-0.6B, two threads).
        self.is_vector_product_faster = (
            weight.device.type == "cpu" and weight.dtype is torch.bfloat16
        )

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] to [rows, out]."""
        if self.is_vector_product_faster and x.shape[0] == 1:
            product = torch.mv(self.weight, x[0])[None]
            return product if self.bias is None else product.add_(self.bias)
        return F.linear(x, self.weight, self.bias)


def plain_linear(weight: Tensor, bias: Tensor | None, kernels: Kernels | None = None) -> nn.Module:
    """The fastest plain linear layer for the weight's device. The layer may use the memory of
    `weight`."""
    if kernels := panels_for(kernels, weight.device, weight.dtype, weight.shape[1]):
        packed = kernels.pack(weight.contiguous(), Format.BFLOAT16)
        return PanelLinear(kernels, Format.BFLOAT16, [packed], weight.shape, bias)
    if weight.device.type == "cpu" and can_pack(weight.dtype):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


def tied_linear(weight: nn.Parameter, kernels: Kernels | None = None) -> nn.Module:
    """A head on the embedding's weight. A PanelLinear packs the weight in place, and the embedding
    has to share it."""
    if panels_for(kernels, weight.device, weight.dtype, weight.shape[1]):
        return plain_linear(weight.data, None, kernels)
    return PlainLinear(weight, None)
