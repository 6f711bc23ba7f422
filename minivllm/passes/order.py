"""The order of the passes, with the reason for each place."""

from __future__ import annotations

from minivllm.passes.base import RuntimePass
from minivllm.passes.compile import CompileLayers
from minivllm.passes.determinism import FixShapes
from minivllm.passes.fuse import FuseLayers
from minivllm.passes.grouped import GroupExperts
from minivllm.passes.native import NativeLayers
from minivllm.passes.streamed import StreamLinears
from minivllm.passes.trim import TrimLastLayer

# Before the engine is built: the cache is sized by the memory that these leave.
BEFORE_ENGINE: tuple[RuntimePass, ...] = (
    # Looks for plain linear layers, so it comes before anything is put around them.
    StreamLinears(),
    # Tries and wraps the linear layers that will multiply, and finds activations in MLPs that are
    # not fused yet.
    FixShapes(),
    # Marks the last attention module; the fused and the native one take the mark over.
    TrimLastLayer(),
    # Takes over linear layers, wrapped or not, as they are by now.
    FuseLayers(),
    # Takes the activation, fused or not, from the experts that it replaces.
    GroupExperts(),
    # A user's own passes (`runtime.passes`) follow here.
)
# Once the engine is there.
AFTER_ENGINE: tuple[RuntimePass, ...] = (
    # Asks which attention backend the engine has, and takes decoder layers over whole.
    NativeLayers(),
    # Runs the engine to compile, so no module may change afterwards.
    CompileLayers(),
    # CUDA graphs (`extras/capture.py`) follow here. They are no pass: they change no module, record
    # what all passes have left, and go on recording while requests are served.
)
OWN_NAMES = frozenset(one.name for one in (*BEFORE_ENGINE, *AFTER_ENGINE))
