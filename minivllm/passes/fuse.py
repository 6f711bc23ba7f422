"""runtime.fused_kernels: several small operations as one Triton kernel, in modules of
passes/fused.py."""

from __future__ import annotations

from minivllm.kernels.choice import takes_triton
from minivllm.models.load.loading import LoadedModel
from minivllm.passes.base import PassContext, PassReport


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
