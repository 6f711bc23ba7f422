"""Activations in 8 bits: `quant.activations=int8` of the methods whose weights are integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from minivllm.errors import BadInput
from minivllm.kernels.cpu.library import Kernels
from minivllm.kernels.cpu.linear import Format, panels_for
from minivllm.kernels.device import BuildContext, takes_triton
from minivllm.quant.base import Quantizer
from minivllm.quant.kernels.int4 import paired
from minivllm.quant.options import IntegerOptions

LEAST_GROUP = 32  # inputs that share a scale: what the kernels take at a time
_NEEDS = "quant.activations=int8 needs the C++ kernels of a CPU, with bfloat16 and AVX2 or later"
_KNOB = "quant.activations=int8 with quant.kernel"


@dataclass(frozen=True)
class Panels:
    """How the C++ kernels multiply a weight.

    Args:
        kernels: in use.
        form: how they store the weight.
        group: inputs that share a scale, of the weight or of activations; 0 for all of them.
    """

    kernels: Kernels
    form: Format
    group: int


class IntegerQuantizer(Quantizer, IntegerOptions):
    """What methods share whose weights are integers: which kernels multiply them, and with
    activations of how many bits."""

    forms: ClassVar[tuple[Format, Format]]  # of a weight for activations in 16 bits, and in 8
    # inputs that share a scale, where the weight has one for all
    activation_group_size: Literal[0, 32, 64, 128, 256] = 0

    @property
    def narrow(self) -> bool:
        """Whether activations have 8 bits."""
        return self.activations == "int8"

    def within(self, context: BuildContext) -> Self:
        """Raises BadInput where no kernel multiplies activations in 8 bits."""
        if self.narrow:
            self._check(context.device, context.kernels)
        return super().within(context)

    def _check(self, device: torch.device, kernels: Kernels | None) -> None:
        """Raise BadInput where no kernel multiplies activations in 8 bits."""
        if self.kernel == "torch":
            raise BadInput(
                "quant.activations=int8: quant.kernel=torch multiplies activations in 16 bits "
                "only; use quant.kernel=auto"
            )
        if self._takes_triton(device):
            return
        if self.dtype is not torch.bfloat16:
            raise BadInput(f"{_NEEDS}; quant.dtype is {str(self.dtype).removeprefix('torch.')}")
        if device.type != "cpu" or kernels is None or not kernels.has_linear:
            where = f"on {device.type}" if device.type != "cpu" else "runtime.cpu_kernels"
            raise BadInput(f"{_NEEDS}, which are not in use ({where}); use quant.activations=none")

    def _takes_triton(self, device: torch.device) -> bool:
        """Whether Triton's kernel multiplies activations in 8 bits. Raises BadInput where it is
        required and cannot run, or is what a GPU needs."""
        chosen = "triton" if device.type == "cuda" else self.kernel
        return takes_triton(_KNOB, chosen, "torch", device)

    def narrow_linear(
        self,
        weight: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        bias: Tensor | None,
        group: int = 0,
    ) -> nn.Module:
        """A layer on Triton's kernel for activations in 8 bits.

        Args:
            weight: int8 [outputs, inputs], or codes uint8.
            scales, zeros: [outputs], or [groups, outputs]; see NarrowLinear.
            bias: [outputs] or None.
            group: see `panels`.
        """
        from minivllm.quant.kernels.narrow import NarrowLinear  # imports Triton

        inputs = weight.shape[1]
        shared = self._shared(inputs, group)
        codes = paired(weight) if weight.dtype is torch.uint8 else weight.contiguous()
        return NarrowLinear(codes, inputs, scales, zeros, bias, shared)

    def _shared(self, inputs: int, group: int) -> int:
        """Inputs of a token that share a scale. Raises BadInput where they do not divide."""
        shared = group or self.activation_group_size or inputs
        if inputs % shared or shared % LEAST_GROUP:
            raise BadInput(
                f"quant.activations=int8: a layer of {inputs} inputs is no multiple of {shared}, "
                f"or that of {LEAST_GROUP}; use other groups, or quant.skip"
            )
        return shared

    def panels(self, device: torch.device, inputs: int, group: int = 0) -> Panels | None:
        """How the C++ kernels multiply a weight; None where they do not, which in 8 bits means that
        Triton's does.

        Args:
            device: of the weight.
            inputs: of the layer.
            group: inputs that share a scale of the weight, 0 for all of them.

        Raises:
            BadInput: activations have 8 bits, and no kernel multiplies them.
        """
        if not self.narrow:
            kernels = panels_for(self.kernels, device, self.dtype, inputs, group or 2, self.kernel)
            return None if kernels is None else Panels(kernels, self.forms[0], group)
        self._check(device, self.kernels)
        if self._takes_triton(device):
            return None
        assert self.kernels is not None
        return Panels(self.kernels, self.forms[1], self._shared(inputs, group))
