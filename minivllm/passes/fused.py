"""Modules with Triton's kernels in place of the layers of models/: several small operations as one
(runtime.fused_kernels), and products of few rows with 16-bit weights (runtime.linear_kernel).
Weights and names stay the same.

Only the exact classes listed here are replaced: a user's own layer stays as it is."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minivllm.attention.base import AttentionBackend, StepBatch
from minivllm.attention.kernels.write import rotate
from minivllm.models.cpu_layers import plain_class
from minivllm.models.families.gemma import GemmaHeadNorm, GemmaNorm
from minivllm.models.families.gemma2 import SandwichLayer
from minivllm.models.families.llama import Decoder
from minivllm.models.layers import (
    ACTIVATIONS,
    MLP,
    Attention,
    DecoderLayer,
    HeadNorm,
    RMSNorm,
    remaining_rows,
    rows_with_logits,
)
from minivllm.models.load.loading import LoadedModel
from minivllm.passes import fused_kernels
from minivllm.passes.base import PassContext, PassReport
from minivllm.quant.kernels.products import stream


class FusedNorm(nn.Module):
    """RMSNorm or GemmaNorm, alone or with the sum before it."""

    def __init__(self, inner: RMSNorm) -> None:
        super().__init__()
        self.weight, self.eps, self.gemma = inner.weight, inner.eps, type(inner) is GemmaNorm

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, size] to the same."""
        return fused_kernels.norm(x, self.weight, self.eps, self.gemma)

    def add(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of both, and the norm of the sum."""
        return fused_kernels.add_norm(x, delta, self.weight, self.eps, self.gemma)


class FusedMLP(nn.Module):
    """MLP with activation and product in one kernel."""

    def __init__(self, inner: MLP) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = inner.gate_up_proj, inner.down_proj
        self.activation = next(
            name for name, known in ACTIVATIONS.items() if known is inner.activation
        )

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] to the same."""
        out: Tensor = self.down_proj(self.gated(self.gate_up_proj(x)))
        return out

    def gated(self, gate_up: Tensor) -> Tensor:
        """[tokens, 2 inner] to [tokens, inner]."""
        return fused_kernels.gated(gate_up, self.activation)


class FusedAttention(nn.Module):
    """Attention with norm and rotation in one kernel; attention=triton writes the cache in the same
    kernel."""

    def __init__(self, inner: Attention) -> None:
        super().__init__()
        self.layer, self.heads, self.kv_heads, self.dim = (
            inner.layer,
            inner.heads,
            inner.kv_heads,
            inner.dim,
        )
        self.widths = (inner.qk_width, inner.v_width)
        self.qkv_proj, self.o_proj, self.qk_norm = inner.qkv_proj, inner.o_proj, inner.qk_norm
        self.trims = inner.trims
        self.norm: tuple[Tensor, float, str] | None = None
        if isinstance(norm := inner.qk_norm, HeadNorm):
            kind = "gemma" if type(norm) is GemmaHeadNorm else "plain"
            self.norm = (norm.weight, norm.eps, kind)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, batch: StepBatch, attention: AttentionBackend
    ) -> Tensor:
        """[tokens, hidden] to the same, or to fewer rows if the layer trims. Keys and values go to
        the backend's cache."""
        qk, v = (
            part.unflatten(1, (-1, self.dim)) for part in self.qkv_proj(x).split(self.widths, -1)
        )
        projected = getattr(attention, "forward_projected", None)
        if projected is not None:
            out = projected(self.layer, qk, v, cos, sin, self.norm, batch)
        else:
            q, k = rotate(qk, cos, sin, self.norm).split((self.heads, self.kv_heads), 1)
            out = attention.forward(self.layer, q, k, v, batch)
        out = out.flatten(1)
        result: Tensor = self.o_proj(rows_with_logits(out, batch) if self.trims else out)
        return result


class FusedLayer(nn.Module):
    """DecoderLayer whose norms include the sum before them. The first norm includes the last sum of
    the layer before."""

    input_layernorm: nn.Module
    self_attn: nn.Module
    post_attention_layernorm: nn.Module
    mlp: nn.Module

    def __init__(self, inner: DecoderLayer | SandwichLayer) -> None:
        super().__init__()
        for name, part in inner.named_children():
            self.add_module(name, part)

    @property
    def norm_before_mlp(self) -> nn.Module:
        """The norm that includes the sum after attention."""
        return self.post_attention_layernorm

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        batch: StepBatch,
        attention: AttentionBackend,
    ) -> tuple[Tensor, Tensor]:
        """Two terms of hidden states [tokens, hidden] to the same, or to fewer rows if the layer
        trims."""
        x, normed = _add(self.input_layernorm, x, delta)
        attended = self.after_attention(self.self_attn(normed, cos, sin, batch, attention))
        x, normed = _add(self.norm_before_mlp, remaining_rows(attended, x, batch), attended)
        return x, self.after_mlp(self.mlp(normed))

    def after_attention(self, out: Tensor) -> Tensor:
        """The second term of the sum after attention, from attention's output."""
        return out

    def after_mlp(self, out: Tensor) -> Tensor:
        """The second term of the sum after the MLP, from the MLP's output."""
        return out


class FusedSandwich(FusedLayer):
    """SandwichLayer whose first and third norm include the sum before them."""

    pre_feedforward_layernorm: nn.Module
    post_feedforward_layernorm: nn.Module

    @property
    def norm_before_mlp(self) -> nn.Module:
        return self.pre_feedforward_layernorm

    def after_attention(self, out: Tensor) -> Tensor:
        normed: Tensor = self.post_attention_layernorm(out)
        return normed

    def after_mlp(self, out: Tensor) -> Tensor:
        normed: Tensor = self.post_feedforward_layernorm(out)
        return normed


def _add(norm: nn.Module, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
    """Hidden states from their two terms, and their norm. Before the first layer there is one
    term."""
    assert isinstance(norm, FusedNorm)
    return (x, norm(x)) if delta is None else norm.add(x, delta)


class FusedDecoder(nn.Module):
    """Decoder whose layers return the last sum as its two terms, which the next norm adds (as in
    vLLM).

    Args:
        inner: its last norm and all norms of its layers are fused.
        layers: replace the layers of `inner`.
    """

    def __init__(self, inner: Decoder, layers: list[FusedLayer]) -> None:
        super().__init__()
        self.embed_tokens, self.layers, self.norm = (
            inner.embed_tokens,
            nn.ModuleList(layers),
            inner.norm,
        )
        self.rope_of_layer, self.rotaries = inner.rope_of_layer, inner.rotaries

    def forward(self, batch: StepBatch, attention: AttentionBackend) -> Tensor:
        x, delta = self.embed_tokens(batch.token_ids), None
        if batch.inputs is not None:
            x = batch.inputs.put(x)
        rotations = [rotary(batch) for rotary in self.rotaries]
        for layer, rope in zip(self.layers, self.rope_of_layer, strict=True):
            x, delta = layer(x, delta, *rotations[rope], batch, attention)
        out: Tensor = _add(self.norm, x, delta)[1]
        return out


def fuse(model: nn.Module) -> int:
    """Replace the modules that have a fused class. Returns the number of replaced modules.

    Norms of queries and keys become part of the attention module."""
    replaced = 0
    with torch.inference_mode():
        for name, module in list(model.named_modules()):
            if (fused := _fused(module)) is not None:
                model.set_submodule(name, fused)
                replaced += 1
        # The decoder is last, as it needs fused layers and norms.
        for name, module in list(model.named_modules()):
            if type(module) is Decoder and (layers := _summing(module)) is not None:
                model.set_submodule(name, FusedDecoder(module, layers))
                replaced += 1 + len(layers)
    return replaced


def _summing(decoder: Decoder) -> list[FusedLayer] | None:
    """Layers that leave their last sum to the next norm; None where a norm or a layer has no fused
    class."""
    layers: list[FusedLayer] = []
    norms = [decoder.norm]
    for layer in decoder.layers:
        if type(layer) is DecoderLayer:
            layers.append(FusedLayer(layer))
            norms += [layer.input_layernorm, layer.post_attention_layernorm]
        elif type(layer) is SandwichLayer:
            layers.append(FusedSandwich(layer))
            norms += [layer.input_layernorm, layer.pre_feedforward_layernorm]
    is_whole = len(layers) == len(decoder.layers) and all(
        isinstance(norm, FusedNorm) for norm in norms
    )
    return layers if is_whole else None


def _fused(module: nn.Module) -> nn.Module | None:
    """The module that replaces this one, or None."""
    plain = plain_class(module)
    if isinstance(module, RMSNorm) and plain in (RMSNorm, GemmaNorm):
        return FusedNorm(module)
    if isinstance(module, MLP) and plain is MLP and module.activation in ACTIVATIONS.values():
        return FusedMLP(module)
    known = (type(None), HeadNorm, GemmaHeadNorm)
    if isinstance(module, Attention) and plain is Attention and type(module.qk_norm) in known:
        return FusedAttention(module)
    return None


class StreamLinears:
    """Replaces every plain linear layer in 16 bits by a StreamedLinear."""

    name = "streamed"

    def apply(self, loaded: LoadedModel, context: PassContext) -> PassReport:
        return PassReport(self.name, stream(loaded.model))


class FuseLayers:
    """Replaces norms, MLPs, attention and decoder by modules with fused kernels."""

    name = "fuse"

    def apply(self, loaded: LoadedModel, context: PassContext) -> PassReport:
        return PassReport(self.name, fuse(loaded.model))
