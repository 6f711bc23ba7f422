"""runtime.cpu_kernels: norms, attention and MLPs that compute with the C++ kernels of CPUs."""

from __future__ import annotations

from minivllm.models.cpu_layers import use_kernels
from minivllm.models.load.loading import LoadedModel
from minivllm.passes.base import PassContext, PassReport


class UseKernels:
    """Changes the class of the layers that models/cpu_layers.py knows. Linear layers pack their
    weights for the kernels when they are loaded."""

    name = "cpu_kernels"

    def is_wanted(self, context: PassContext) -> bool:
        return context.build.kernels is not None

    def apply(self, loaded: LoadedModel, context: PassContext) -> PassReport:
        """See ModelPass. A model that was loaded without the kernels stays without them."""
        return PassReport(self.name, use_kernels(loaded.model, loaded.kernels))
