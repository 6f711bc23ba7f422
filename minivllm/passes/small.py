"""Passes of a few lines, one a knob of `runtime`.

cpu_kernels        norms, attention and MLPs compute with the C++ kernels of CPUs
linear_kernel      Triton's kernel computes products of few rows with 16-bit weights
trim_last_layer    after its attention the last layer computes only tokens that need logits
fused_kernels      several small operations as one Triton kernel, in modules of passes/fused.py
kernel_choice      products take the way that is faster on this machine
"""

from __future__ import annotations

from minivllm.kernels.cpu.choices import choose
from minivllm.kernels.cpu.linear import PanelLinear
from minivllm.kernels.device import takes_triton
from minivllm.models.costs import trims
from minivllm.models.cpu_layers import use_kernels
from minivllm.models.families.llama import LlamaForCausalLM
from minivllm.models.layers import Attention
from minivllm.models.load.loading import LoadedModel
from minivllm.passes.base import PassContext, PassReport, linear_layers


class UseKernels:
    """Changes the class of the layers that models/cpu_layers.py knows. Linear layers pack their
    weights for the kernels when they are loaded."""

    name = "cpu_kernels"

    def is_wanted(self, context: PassContext) -> bool:
        return context.build.kernels is not None

    def apply(self, loaded: LoadedModel, context: PassContext) -> PassReport:
        """See ModelPass. A model that was loaded without the kernels stays without them."""
        return PassReport(self.name, use_kernels(loaded.model, loaded.kernels))


class StreamLinears:
    """Replaces every plain linear layer in 16 bits by a StreamedLinear."""

    name = "streamed"

    def is_wanted(self, context: PassContext) -> bool:
        chosen = context.runtime["linear_kernel"]
        return takes_triton("runtime.linear_kernel", chosen, "torch", context.device)

    def apply(self, loaded: LoadedModel, context: PassContext) -> PassReport:
        from minivllm.quant.kernels.products import stream  # imports Triton

        return PassReport(self.name, stream(loaded.model))


def trim(model: LlamaForCausalLM) -> None:
    """Let the last layer compute what follows its attention only for tokens that need logits: no
    other token of the step depends on it. To be called before passes replace the attention
    modules."""
    last = model.model.layers[-1].get_submodule("self_attn")
    assert isinstance(last, Attention)
    model.trims = last.trims = True


class TrimLastLayer:
    """Trims the model's last layer."""

    name = "trim"

    def is_wanted(self, context: PassContext) -> bool:
        return trims(context.runtime)

    def apply(self, loaded: LoadedModel, context: PassContext) -> PassReport:
        trim(loaded.model)
        return PassReport(self.name, 1)


class FuseLayers:
    """Replaces norms, MLPs, attention and decoder by modules with fused kernels."""

    name = "fuse"

    def is_wanted(self, context: PassContext) -> bool:
        """See RuntimePass. The compiler makes the same fusions, and these kernels are opaque to
        it."""
        chosen = "off" if context.runtime["compile"] else context.runtime["fused_kernels"]
        return takes_triton("runtime.fused_kernels", chosen, "off", context.device)

    def apply(self, loaded: LoadedModel, context: PassContext) -> PassReport:
        from minivllm.passes.fused import fuse  # imports Triton

        return PassReport(self.name, fuse(loaded.model))


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
