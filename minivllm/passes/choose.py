"""runtime.kernel_choice=measured: products take the way that is faster on this machine."""

from __future__ import annotations

from minivllm.kernels.cpu.choices import choose
from minivllm.kernels.cpu.linear import PanelLinear
from minivllm.models.load.loading import LoadedModel
from minivllm.passes.base import PassContext, PassReport
from minivllm.passes.linear_layers import linear_layers

_KNOB = "runtime.kernel_choice=measured"


class ChooseKernels:
    """Sets the rows of each layer's ways, where it has two (kernels/cpu/choices.py)."""

    name = "choose"

    def is_wanted(self, context: PassContext) -> bool:
        return bool(context.runtime["kernel_choice"] == "measured")

    def apply(self, loaded: LoadedModel, context: PassContext) -> PassReport:
        count, problem = 0, None
        if loaded.kernels is not None:
            layers = [one for one in linear_layers(loaded) if isinstance(one, PanelLinear)]
            count, problem = choose(loaded.kernels, layers)
        notes = []
        if not count:
            notes.append(f"{_KNOB} has nothing to choose: no layer has two kernels of equal bits")
        if problem is not None:
            notes.append(f"{_KNOB}: the choices are not kept: {problem}")
        return PassReport(self.name, count, notes=tuple(notes))
