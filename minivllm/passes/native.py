"""runtime.native_layers: the forward pass on a CPU, with one call of C++ for each decoder layer
(kernels/cpu/layer.h).

Beside it are the passes that it needs: which layers compute with the C++ kernels
(runtime.cpu_kernels), and which of two ways a product takes (runtime.kernel_choice).

Only layers and models whose parts all have an exact class listed here are replaced: a user's own
layer or model stays as it is."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from minivllm.attention.base import AttentionBackend, StepBatch
from minivllm.attention.kernels.cpu import CPUBackend
from minivllm.kernels.cpu.library import Kernels
from minivllm.kernels.cpu.linear import PanelLinear
from minivllm.models.cpu_layers import CPUMLP, CPUAttention, CPUNorm, use_kernels
from minivllm.models.families.llama import Decoder, LlamaForCausalLM
from minivllm.models.layers import DecoderLayer, Embedding, HeadNorm
from minivllm.models.load.loading import LoadedModel
from minivllm.models.rope import Rotary
from minivllm.passes.base import PassContext, PassReport, linear_layers

_CHOICE = "runtime.kernel_choice=measured"
FIRST_ROW = torch.zeros(1, dtype=torch.int64)  # of a step without logits: no operation takes none


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
        rows = None
        if self.trims and len(batch.logit_rows) != len(x):
            rows = batch.logit_rows if len(batch.logit_rows) else FIRST_ROW
        out: Tensor = self.run(
            x, cos, sin, *cast(CPUBackend, attention).arguments(self.layer, batch), rows
        )
        return out


class NativeForward:
    """The forward pass from embedding to logits, of a model that `is_native_model` accepts: the
    operations of its modules in the same order, so the results are equal to the bit.

    Args:
        model: with native layers.
        kernels: in use.
    """

    def __init__(self, model: LlamaForCausalLM, kernels: Kernels) -> None:
        decoder = model.model
        norm = cast(CPUNorm, decoder.norm)
        self.layers, self.rope_of_layer = decoder.layers, decoder.rope_of_layer
        self.look_up, self.embedding = decoder.embed_tokens.look_up, decoder.embed_tokens.weight
        self.tables = [cast(Rotary, rotary).table for rotary in decoder.rotaries]
        self.normalize, self.norm = kernels.rms_norm, (norm.weight, norm.eps)
        self.multiply, self.head = kernels.linear, _state(model.lm_head)

    @torch.inference_mode()
    def __call__(self, batch: StepBatch, attention: AttentionBackend) -> Tensor:
        """Hidden states after the final norm; see LlamaForCausalLM.forward."""
        x = self.look_up(self.embedding, batch.token_ids)
        if batch.inputs is not None:
            x = batch.inputs.put(x)
        # cosines and sines of each rope, [tokens, 1, rotated dimensions]
        rotations = [table.index_select(0, batch.positions).unbind(1) for table in self.tables]
        for layer, rope in zip(self.layers, self.rope_of_layer, strict=True):
            x = layer(x, *rotations[rope], batch, attention)
        hidden: Tensor = self.normalize(x, *self.norm)
        return hidden

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [rows, hidden] to logits [rows, vocab], in the compute dtype."""
        logits: Tensor = self.multiply(hidden, *self.head)
        return logits


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


def is_native_model(model: nn.Module) -> bool:
    """Whether NativeForward has every part of a model."""
    return (
        isinstance(model, LlamaForCausalLM)
        and type(model).forward is LlamaForCausalLM.forward
        and type(model).compute_logits is LlamaForCausalLM.compute_logits
        and type(decoder := model.model) is Decoder
        and type(decoder.embed_tokens) is Embedding
        and all(type(layer) is NativeLayer for layer in decoder.layers)
        and all(type(rope) is Rotary and not rope.depends_on_length for rope in decoder.rotaries)
        and type(decoder.norm) is CPUNorm
        and type(model.lm_head) is PanelLinear
        and model.config.final_soft_cap is None
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


class UseKernels:
    """Changes the class of the layers that models/cpu_layers.py knows. Linear layers pack their
    weights for the kernels when they are loaded."""

    name = "cpu_kernels"

    def apply(self, loaded: LoadedModel, context: PassContext) -> PassReport:
        """Change the layers. A model that was loaded without the kernels stays without them."""
        return PassReport(self.name, use_kernels(loaded.model, loaded.kernels))


class ChooseKernels:
    """Sets the rows of each layer's ways, where it has two (kernels/cpu/choices.py)."""

    name = "choose"

    def apply(self, loaded: LoadedModel, context: PassContext) -> PassReport:
        from minivllm.kernels.cpu.choices import choose

        count, problem = 0, None
        if loaded.kernels is not None:
            layers = [one for one in linear_layers(loaded) if isinstance(one, PanelLinear)]
            count, problem = choose(loaded.kernels, layers)
        notes = []
        if not count:
            notes.append(f"{_CHOICE} has nothing to choose: no layer has two kernels of equal bits")
        if problem is not None:
            notes.append(f"{_CHOICE}: the choices are not kept: {problem}")
        return PassReport(self.name, count, notes=tuple(notes))


class NativeLayers:
    """Replaces decoder layers by native ones, and what calls them where all parts are native."""

    name = "native"

    def apply(self, loaded: LoadedModel, context: PassContext) -> PassReport:
        assert context.engine is not None
        runner = context.engine.runner
        count = make_native(loaded.model.model.layers, runner.attention, loaded.kernels)
        if loaded.kernels is not None and is_native_model(loaded.model):
            runner.model = NativeForward(loaded.model, loaded.kernels)
        return PassReport(self.name, count)
