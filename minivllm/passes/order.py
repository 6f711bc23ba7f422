"""The order of the passes, with the reason for each place."""

from __future__ import annotations

from minivllm.passes.base import RuntimePass
from minivllm.passes.compile import CompileLayers
from minivllm.passes.determinism import FixShapes
from minivllm.passes.grouped import GroupExperts
from minivllm.passes.native import NativeLayers
from minivllm.passes.pruning.shapes import PASS
from minivllm.passes.shard import ShardLayers
from minivllm.passes.small import (
    ChooseKernels,
    FuseLayers,
    StreamLinears,
    TrimLastLayer,
    UseKernels,
)

# Applied before the engine is built: the cache takes memory that these passes leave.
BEFORE_ENGINE: tuple[RuntimePass, ...] = (
    # Changes only layers of the families' own classes with their own activations, so it comes
    # before passes that replace modules or activations.
    UseKernels(),
    # Looks for plain linear layers, so it comes before passes that wrap them.
    StreamLinears(),
    # Wraps linear layers in their final class, and changes activations in MLPs that are not fused
    # yet.
    FixShapes(),
    # Marks the last attention module; a fused and a native module copy the mark.
    TrimLastLayer(),
    # Keeps linear layers, wrapped or not, in their present class.
    FuseLayers(),
    # Keeps the activation, fused or not, of the experts that it replaces.
    GroupExperts(),
    # Wraps what a rank has only a term of: linear layers, wrapped or not, and whole mixtures.
    ShardLayers(),
    # A user's own passes (`runtime.passes`) follow here.
)
# Applied after the engine is built.
AFTER_ENGINE: tuple[RuntimePass, ...] = (
    # Times the linear layers that all passes so far have left; native layers copy what it sets.
    ChooseKernels(),
    # Needs the attention backend of the engine, and replaces whole decoder layers.
    NativeLayers(),
    # Runs the engine to compile it, so no module may change afterwards.
    CompileLayers(),
    # CUDA graphs (`extras/capture.py`) follow here. They are no pass: they change no module, record
    # the modules that all passes leave, and record further steps while requests are served.
)
# Pruning happens while weights are read, before all of these, and reports as they do.
OWN_NAMES = frozenset((PASS, *(one.name for one in (*BEFORE_ENGINE, *AFTER_ENGINE))))
