"""IQ4_NL: four bits a weight, on 16 integer levels, scaled by blocks of 32 inputs.

A format of GGUF files, which quant=nf4 computes with as it is stored: like NF4, it looks its levels
up. The levels are those of ggml (https://github.com/ggml-org/ggml)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minivllm.kernels.cpu.linear import Format, PanelLinear, panels_for
from minivllm.quant.base import frozen
from minivllm.quant.kernels.common import by_rows
from minivllm.quant.nf4 import NF4

LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def iq4_nl_linear(codes: Tensor, scale: Tensor, bias: Tensor | None, method: NF4) -> nn.Module:
    """The layer of w = LEVELS[code] * scale: a PanelLinear where the C++ kernels support the
    weight.

    Args:
        codes: uint8 [out, in], 0..15.
        scale: [out, blocks] in the compute dtype.
        bias: [out] or None.
        method: its kernels and its knob `kernel`.
    """
    columns = codes.shape[1]
    group = columns // scale.shape[1]
    kernels = panels_for(method.kernels, codes.device, method.dtype, columns, group, method.kernel)
    if kernels is None:
        return IQ4NLLinear(codes, scale, bias)
    packed = [kernels.pack(codes, Format.IQ4_NL)]
    return PanelLinear(kernels, Format.IQ4_NL, packed, codes.shape, bias, scale.t(), group=group)


class IQ4NLLinear(nn.Module):
    """A linear layer for any device, on codes of which a byte has two. The weight is converted some
    rows at a time, at every call. Arguments are those of `iq4_nl_linear`."""

    def __init__(self, codes: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.codes, self.scale = frozen(codes[:, ::2] | codes[:, 1::2] << 4), frozen(scale)
        self.bias = None if bias is None else frozen(bias)
        levels = torch.tensor(LEVELS, dtype=scale.dtype, device=scale.device)
        self.levels = nn.Buffer(levels, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] to [rows, out]."""
        parts = []
        for stored, factor in by_rows(self.codes, self.scale):
            codes = torch.stack((stored & 15, stored >> 4), -1).flatten()
            groups = self.levels.index_select(0, codes.int()).view(*factor.shape, -1)
            parts.append(F.linear(x, groups.mul_(factor[..., None]).flatten(1)))
        out = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return out if self.bias is None else out.add_(self.bias)
