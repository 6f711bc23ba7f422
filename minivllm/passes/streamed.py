"""runtime.linear_kernel=triton: Triton's kernel computes products of few rows with 16-bit
weights."""

from __future__ import annotations

from minivllm.kernels.choice import takes_triton
from minivllm.models.load.loading import LoadedModel
from minivllm.passes.base import PassContext, PassReport


class StreamLinears:
    """Replaces every plain linear layer in 16 bits by a StreamedLinear."""

    name = "streamed"

    def is_wanted(self, context: PassContext) -> bool:
        chosen = context.runtime["linear_kernel"]
        return takes_triton("runtime.linear_kernel", chosen, "torch", context.device)

    def apply(self, loaded: LoadedModel, context: PassContext) -> PassReport:
        from minivllm.quant.kernels.streamed import stream  # imports Triton

        return PassReport(self.name, stream(loaded.model))
