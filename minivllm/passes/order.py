"""The order of minivllm's own passes, with the knobs that enable each and the reason for its place.

A pass is imported where knobs enable it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.kernels.device import takes_triton
from minivllm.models.costs import trims
from minivllm.models.layers import Attention
from minivllm.models.load.loading import LoadedModel
from minivllm.passes.base import ModelPass, PassContext, PassReport
from minivllm.passes.pruning.options import PASS
from minivllm.platform.plug_ins import locate


@dataclass(frozen=True)
class RuntimePass:
    """A pass that knobs of `runtime` enable.

    Attributes:
        name: in the report; that of the class.
        target: module.Class below this room; its constructor takes nothing.
        is_wanted: whether the knobs enable the pass; called before weights are loaded. Raises
            BadInput if they do, and it cannot be done on this machine.
    """

    name: str
    target: str
    is_wanted: Callable[[PassContext], Any]


def wanted(passes: Sequence[RuntimePass], context: PassContext) -> list[ModelPass]:
    """Those of the passes that the knobs enable, in their order.

    Raises:
        BadInput: knobs enable one that cannot run on this machine.
    """
    return [locate(f"{__package__}.{one.target}")() for one in passes if one.is_wanted(context)]


def _streams(context: PassContext) -> bool:
    chosen = context.runtime["linear_kernel"]
    return takes_triton("runtime.linear_kernel", chosen, "torch", context.device)


def _fuses(context: PassContext) -> bool:
    """The compiler makes the same fusions, and Triton's kernels are opaque to it."""
    chosen = "off" if context.runtime["compile"] else context.runtime["fused_kernels"]
    return takes_triton("runtime.fused_kernels", chosen, "off", context.device)


def _groups(context: PassContext) -> bool:
    """`auto` groups experts on some GPUs alone."""
    chosen = context.build.moe
    return chosen == "grouped" or (chosen == "auto" and context.device.type == "cuda")


class TrimLastLayer:
    """Lets the last layer compute what follows its attention only for tokens that need logits: no
    other token of the step depends on it. To be applied before passes replace attention modules."""

    name = "trim"

    def apply(self, loaded: LoadedModel, context: PassContext) -> PassReport:
        last = loaded.model.model.layers[-1].get_submodule("self_attn")
        assert isinstance(last, Attention)
        loaded.model.trims = last.trims = True
        return PassReport(self.name, 1)


# Applied before the engine is built: the cache takes memory that these passes leave.
BEFORE_ENGINE = (
    # Changes only layers of the families' own classes with their own activations, so it comes
    # before passes that replace modules or activations.
    RuntimePass("cpu_kernels", "native.UseKernels", lambda c: c.build.kernels is not None),
    # Looks for plain linear layers, so it comes before passes that wrap them.
    RuntimePass("streamed", "fused.StreamLinears", _streams),
    # Wraps linear layers in their final class, and changes activations in MLPs that are not fused
    # yet.
    RuntimePass(
        "determinism", "determinism.FixShapes", lambda c: c.runtime["determinism"] != "off"
    ),
    # Marks the last attention module; a fused and a native module copy the mark.
    RuntimePass("trim", "order.TrimLastLayer", lambda c: trims(c.runtime)),
    # Keeps linear layers, wrapped or not, in their present class.
    RuntimePass("fuse", "fused.FuseLayers", _fuses),
    # Keeps the activation, fused or not, of the experts that it replaces.
    RuntimePass("grouped", "grouped.GroupExperts", _groups),
    # Wraps what a rank has only a term of: linear layers, wrapped or not, and whole mixtures.
    RuntimePass("shard", "shard.ShardLayers", lambda c: c.build.ranks.size > 1),
    # A user's own passes (`runtime.passes`) follow here.
)
# Applied after the engine is built.
AFTER_ENGINE = (
    # Times the linear layers that all passes so far have left; native layers copy what it sets.
    RuntimePass(
        "choose", "native.ChooseKernels", lambda c: c.runtime["kernel_choice"] == "measured"
    ),
    # Needs the attention backend of the engine, and replaces whole decoder layers.
    RuntimePass("native", "native.NativeLayers", lambda c: c.runtime["native_layers"]),
    # Runs the engine to compile it, so no module may change afterwards.
    RuntimePass("compile", "compile.CompileLayers", lambda c: c.runtime["compile"]),
    # CUDA graphs (`extras/capture.py`) follow here. They are no pass: they change no module, record
    # the modules that all passes leave, and record further steps while requests are served.
)
# Pruning happens while weights are read, before all of these, and reports as they do.
OWN_NAMES = frozenset((PASS, *(one.name for one in (*BEFORE_ENGINE, *AFTER_ENGINE))))
