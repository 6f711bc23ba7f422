"""runtime.native_layers: decoder layers that are one call of C++ each (kernels/cpu/layer.h).

Only layers whose parts all have an exact class listed here are replaced: a user's own layer stays
as it is."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from minivllm.attention.base import AttentionBackend
from minivllm.attention.batch import StepBatch
from minivllm.attention.kernels.cpu import CPUBackend
from minivllm.kernels.cpu.library import Kernels
from minivllm.kernels.cpu.linear import PanelLinear
from minivllm.models.cpu_layers import CPUMLP, CPUAttention, CPUNorm
from minivllm.models.head_norm import HeadNorm
from minivllm.models.layers import DecoderLayer
from minivllm.models.load.loading import LoadedModel
from minivllm.passes.base import PassContext, PassReport


class NativeLayer(DecoderLayer):
    """DecoderLayer in one call of the same operations in the same order: the results are equal to
    the bit.

    For one token, eleven small operations take as long as their calls from Python.

    Args:
        inner: a layer that `is_native` accepts; this module has the same parts.
        kernels: in use.
    """

    def __init__(self, inner: DecoderLayer, kernels: Kernels) -> None:
        attention, mlp = cast(CPUAttention, inner.self_attn), cast(CPUMLP, inner.mlp)
        first, second = (
            cast(CPUNorm, inner.input_layernorm),
            cast(CPUNorm, inner.post_attention_layernorm),
        )
        super().__init__(attention, mlp, (first, second))
        self.layer, self.trims = attention.layer, attention.trims
        norm = cast(HeadNorm | None, attention.qk_norm)
        self.run = kernels.decoder_layer(
            *((first.weight, first.eps), _state(attention.qkv_proj)),
            None if norm is None else (norm.weight, norm.eps),
            *(_state(attention.o_proj), (second.weight, second.eps)),
            *(_state(mlp.gate_up_proj), _state(mlp.down_proj)),
            *(attention.heads, attention.kv_heads, attention.dim),
        ).forward

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, batch: StepBatch, attention: AttentionBackend
    ) -> Tensor:
        """[tokens, hidden] to the same, or to fewer rows if the layer trims."""
        if self.trims and len(batch.logit_rows) != len(x):
            return super().forward(x, cos, sin, batch, attention)
        out: Tensor = self.run(
            x, cos, sin, *cast(CPUBackend, attention).arguments(self.layer, batch)
        )
        return out


def _state(linear: nn.Module) -> tuple[Tensor | int | None, ...]:
    return cast(PanelLinear, linear).state


def is_native(layer: nn.Module) -> bool:
    """Whether layer.h has every part of a layer."""
    if type(layer) is not DecoderLayer:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    if type(attention) is not CPUAttention or type(mlp) is not CPUMLP:
        return False
    linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    return (
        all(type(linear) is PanelLinear for linear in linears)
        and all(type(norm) is CPUNorm for norm in norms)
        and type(attention.qk_norm) in (type(None), HeadNorm)
    )


def make_native(layers: nn.ModuleList, attention: AttentionBackend, kernels: Kernels | None) -> int:
    """Replace layers where attention uses the C++ kernels, too. Returns the number of replaced
    layers."""
    replaced = 0
    if kernels is None or type(attention) is not CPUBackend:
        return replaced
    for number, layer in enumerate(layers):
        if is_native(layer):
            layers[number] = NativeLayer(cast(DecoderLayer, layer), kernels)
            replaced += 1
    return replaced


class NativeLayers:
    """Replaces decoder layers by native ones."""

    name = "native"

    def is_wanted(self, context: PassContext) -> bool:
        return bool(context.runtime["native_layers"])

    def apply(self, loaded: LoadedModel, context: PassContext) -> PassReport:
        assert context.engine is not None
        attention = context.engine.runner.attention
        return PassReport(
            self.name, make_native(loaded.model.model.layers, attention, loaded.kernels)
        )
