"""Activations in 8 bits: `quant.activations=int8` of the methods whose weights are integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch

from minivllm.errors import BadInput
from minivllm.kernels.context import BuildContext
from minivllm.kernels.cpu.library import Kernels
from minivllm.kernels.cpu.linear import Format, panels_for
from minivllm.quant.base import Quantizer
from minivllm.quant.options import IntegerOptions

LEAST_GROUP = 32  # inputs that share a scale: what the kernels take at a time
_NEEDS = "quant.activations=int8 needs the C++ kernels of a CPU, with bfloat16 and AVX2 or later"


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


class IntegerQuantizer(Quantizer, IntegerOptions):  # type: ignore[misc]  # see Method.dtype
    """What methods share whose weights are integers: which kernels multiply them, and with
    activations of how many bits."""

    forms: ClassVar[tuple[Format, Format]]  # of a weight for activations in 16 bits, and in 8
    activation_group_size: int = 0  # inputs that share a scale, where the weight has one for all

    @property
    def narrow(self) -> bool:
        """Whether activations have 8 bits."""
        return self.activations == "int8"

    def within(self, context: BuildContext) -> Self:
        """See Method. Raises BadInput where no kernel multiplies activations in 8 bits."""
        if self.narrow:
            self._check(context.device, context.kernels)
        return super().within(context)

    def _check(self, device: torch.device, kernels: Kernels | None) -> None:
        """Raise BadInput where no kernel multiplies activations in 8 bits."""
        if self.kernel != "auto":
            raise BadInput(
                f"quant.activations=int8: quant.kernel={self.kernel} multiplies activations in 16 "
                "bits only; use quant.kernel=auto"
            )
        if self.dtype is not torch.bfloat16:
            raise BadInput(f"{_NEEDS}; quant.dtype is {str(self.dtype).removeprefix('torch.')}")
        if device.type != "cpu" or kernels is None or not kernels.has_linear:
            where = f"on {device.type}" if device.type != "cpu" else "runtime.cpu_kernels"
            raise BadInput(f"{_NEEDS}, which are not in use ({where}); use quant.activations=none")

    def panels(self, device: torch.device, inputs: int, group: int = 0) -> Panels | None:
        """How the C++ kernels multiply a weight; None where they do not.

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
        assert self.kernels is not None
        shared = group or self.activation_group_size or inputs
        if inputs % shared or shared % LEAST_GROUP:
            raise BadInput(
                f"quant.activations=int8: a layer of {inputs} inputs is no multiple of {shared}, "
                f"or that of {LEAST_GROUP}; use other groups, or quant.skip"
            )
        return Panels(self.kernels, self.forms[1], shared)
