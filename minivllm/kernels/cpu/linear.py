"""Linear layers on packed weights (linear.h) or on weights that oneDNN has reordered, and which
weights can be either."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from minivllm.kernels.cpu.chunks import gathered
from minivllm.kernels.cpu.library import Kernels

PANEL = 64  # outputs of one piece of a packed weight
MOST_IN_GROUP = 256  # inputs of a group that are converted at once


class Format(IntEnum):
    """How a weight is stored; the numbers are those of linear.h."""

    BFLOAT16 = 0
    INT8 = 1
    INT4 = 2
    NF4 = 3
    UINT4 = 4
    IQ4_NL = 5
    INT8_QUADS = 6
    INT4_QUADS = 7
    UINT4_QUADS = 8

    @property
    def is_narrow(self) -> bool:
        """Whether activations are multiplied in 8 bits."""
        return self >= Format.INT8_QUADS


def panels_for(
    kernels: Kernels | None,
    device: torch.device,
    dtype: torch.dtype,
    inputs: int,
    group: int = 2,
    kernel: str = "auto",
) -> Kernels | None:
    """The kernels, if there are any and they support a weight with scales of `group` inputs.

    `kernel` is the knob quant.kernel: the result is None if it names another kernel."""
    fits = (
        dtype is torch.bfloat16 and device.type == "cpu" and inputs % group == 0 and inputs % 2 == 0
    )
    return (
        kernels
        if kernels is not None and kernels.has_linear and fits and kernel == "auto"
        else None
    )


class PanelLinear(nn.Module):
    """A linear layer on one packed copy of its weight, for any number of rows.

    Args:
        kernels: that `panels_for` gave.
        form: how the weight is stored.
        packed: pieces of the weight as `kernels.pack` makes them of [out, in]: of bfloat16, whose
            memory it may take over, of int8, or of codes in uint8. All but the last have a multiple
            of 64 outputs.
        shape: outputs and inputs.
        bias: bfloat16 [out] or None.
        scales, zeros: [groups, out], or None as the format has none.
        group: inputs that share a scale, of the weight or of activations in 8 bits; 0 for all.
    """

    kernel_name = "PanelLinear"
    matrix_dtype: str | None = None
    # What makes the layer again: its parameters, and numbers and texts beside them.
    parts = ("weight", "scales", "zeros", "bias")
    facts = ("form", "outputs", "group", "kernel_name", "matrix_dtype")
    few_rows = -1  # rows up to which the way for few rows is taken; -1: as the kernel does

    def __init__(
        self,
        kernels: Kernels,
        form: Format,
        packed: Sequence[Tensor],
        shape: tuple[int, ...],
        bias: Tensor | None,
        scales: Tensor | None = None,
        zeros: Tensor | None = None,
        group: int = 0,
    ) -> None:
        super().__init__()
        self.outputs, inputs = shape
        repeats = 1 if form.is_narrow else max(1, -(-group // MOST_IN_GROUP))
        if form.is_narrow:
            self.kernel_name, self.matrix_dtype = "PanelLinear, 8-bit activations", "int8"

        def by_group(values: Tensor | None) -> nn.Parameter | None:
            if values is None:
                return None
            padded = F.pad(values.to(torch.bfloat16), (0, -self.outputs % PANEL)).repeat_interleave(
                repeats, 0
            )
            panels = padded.unflatten(1, (-1, PANEL)).transpose(
                0, 1
            )  # the values of a panel are read in a row
            return nn.Parameter(panels.contiguous(), requires_grad=False)

        whole = gathered(packed, kernels.use_huge_pages_)
        self.weight = nn.Parameter(whole, requires_grad=False)  # uint8 [panels, bytes]
        self.scales, self.zeros = by_group(scales), by_group(zeros)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.form, self.group = int(form), group // repeats if group else inputs
        self.multiply = kernels.linear

    @classmethod
    def again(cls, kernels: Kernels, parts: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Self:
        """The layer that had these parts, without those that it lacked, and these facts."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        for name in cls.parts:
            value = parts.get(name)
            whole = None if value is None else nn.Parameter(value, requires_grad=False)
            layer.register_parameter(name, whole)
        for name in cls.facts:
            setattr(layer, name, facts[name])
        layer.multiply = kernels.linear
        return layer

    @property
    def state(self) -> tuple[Tensor | int | None, ...]:
        """The arguments of `kernels.linear` after x."""
        tensors = self.weight, self.scales, self.zeros, self.bias
        return *tensors, self.form, self.outputs, self.group, self.few_rows

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] to [rows, out]."""
        out: Tensor = self.multiply(x, *self.state)
        return out

    def first(self, count: int) -> PanelLinear:
        """The layer of the first outputs: `count`, and those that share a panel with them. It
        shares this one's memory."""
        panels = -(-count // PANEL)
        part = copy.copy(self)
        part._parameters = {
            name: None if whole is None else nn.Parameter(whole[:panels], requires_grad=False)
            for name, whole in self._parameters.items()
        }
        if self.bias is not None:
            part.bias = nn.Parameter(self.bias[: panels * PANEL], requires_grad=False)
        part.outputs = min(self.outputs, panels * PANEL)
        return part


class PackedLinear(nn.Module):
    """A linear layer on the CPU whose weight oneDNN has reordered once, for its own tiles.

    F.linear reorders the weight, or multiplies without reordering, at every call: a single thread
    took 1.25 to 1.5 times as long on the shapes of Qwen3-0.6B in bfloat16, at 1 to 256 rows. The
    result is the same."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] to [rows, out]."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return out


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes in this dtype on this processor."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True
