"""Layers of layers.py that compute with the C++ kernels of CPUs. The weights and names of a module
stay as they are, only its class becomes another.

Only the classes that are known here change, each exactly: a user's own layer stays as it is.
"""

from __future__ import annotations

from torch import Tensor, nn

from minivllm.kernels.cpu.library import Kernels
from minivllm.kernels.cpu.linear import PanelLinear
from minivllm.models.layers import ACTIVATIONS, MLP, Attention, Embedding, HeadNorm, RMSNorm

_VECTOR = 16  # numbers that a kernel computes at a time


class CPUNorm(RMSNorm):
    """RMSNorm of [rows, size] in one kernel."""

    kernels: Kernels

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same."""
        if x.dim() != 2:
            return super().forward(x)
        out: Tensor = self.kernels.rms_norm(x, self.weight, self.eps)
        return out


class CPUAttention(Attention):
    """Attention with the norm and rotation of queries and keys in one kernel, in place."""

    kernels: Kernels

    def rotated(self, qk: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        weight, eps = None, 0.0
        if type(self.qk_norm) is HeadNorm:
            weight, eps = self.qk_norm.weight, self.qk_norm.eps
        elif self.qk_norm is not None:
            qk = self.qk_norm(qk)
        self.kernels.norm_and_rotate_(qk, weight, eps, cos, sin)
        return qk


class CPUMLP(MLP):
    """MLP with SiLU and product in one kernel."""

    kernels: Kernels

    def gated(self, gate_up: Tensor) -> Tensor:
        out: Tensor = self.kernels.silu_and_multiply(gate_up)
        return out


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    RMSNorm: CPUNorm,
    Attention: CPUAttention,
    MLP: CPUMLP,
}


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class of layers.py that a module had before `use_kernels`; its own class otherwise."""
    return next((plain for plain, own in _CLASSES.items() if type(module) is own), type(module))


def use_kernels(model: nn.Module, kernels: Kernels | None) -> int:
    """Let the modules of a model compute with the kernels, if there are kernels, where the sizes
    of a module fit them. Returns the number of changed modules."""
    changed = 0
    for module in model.modules() if kernels is not None else ():
        if type(module) in _CLASSES and _fits(module):
            module.__class__ = _CLASSES[type(module)]
            module.kernels = kernels  # type: ignore[assignment]  # no tensor and no module
            changed += 1
    return changed


def _fits(module: nn.Module) -> bool:
    """Whether the kernels take a module's sizes."""
    if isinstance(module, RMSNorm):
        return module.shape[0] % _VECTOR == 0
    if isinstance(module, Attention):
        # The kernel rotates as many pairs of dimensions at a time.
        rotary_fits = all(dim % (2 * _VECTOR) == 0 for dim in module.rotary_dims)
        return module.dim % _VECTOR == 0 and rotary_fits
    assert isinstance(module, MLP)
    return module.activation is ACTIVATIONS["silu"] and module.inner % _VECTOR == 0


def share_packed(embedding: Embedding, head: PanelLinear, kernels: Kernels) -> None:
    """Let an embedding look its rows up in the packed weight of the head, which is its own weight
    in another order."""
    embedding.weight = head.weight
    embedding.look_up = kernels.embed
