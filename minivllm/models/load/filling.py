"""Weights are read into a model on the meta device, one tensor at a time, on their device in their
dtype."""

from __future__ import annotations

import ctypes
import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from minivllm.kernels.cpu.linear import PanelLinear
from minivllm.kernels.device import BuildContext
from minivllm.models.config import ModelConfig
from minivllm.models.cpu_layers import share_packed
from minivllm.models.families.llama import LlamaForCausalLM
from minivllm.models.layers import HeadNorm, Linear
from minivllm.models.load.names import part_names
from minivllm.models.load.source import Source
from minivllm.models.load.weights import CheckpointWeights, WeightSource
from minivllm.models.registry import model_class
from minivllm.quant.base import QuantMethod, Shapes
from minivllm.quant.plain import plain_linear, tied_linear

if TYPE_CHECKING:
    from minivllm.models.load.gguf.packed import PackedLayers
    from minivllm.models.load.prequantized import Prequantized
    from minivllm.models.vision.registry import LoadedVision

_RETURN_EVERY = 64 << 20  # bytes of weights


@dataclass
class Filled:
    """What filling a model with weights showed, beside the weights."""

    sizes: dict[str, int]  # the byte counts of LoadedModel
    warnings: list[str]
    stored_bytes: dict[str, int]  # of a GGUF file, by its formats


def filled_model(
    source: Source,
    model: LlamaForCausalLM,
    vision: LoadedVision | None,
    reader: WeightSource,
    quant: QuantMethod,
    context: BuildContext,
) -> Filled:
    """Load the weights of a model and its tower on the meta device."""
    before = _stored_layers(source, reader, quant, model)
    stored = before.shapes if before is not None else {}
    shapes = expected_shapes(model, before) | ({} if vision is None else vision.tower.shapes)
    reader.check(shapes | stored, model.config.tie_word_embeddings, stored)
    sizes = _fill(model, reader, quant, context, before)
    if vision is not None:
        vision.tower.fill(reader.fill, quant.dtype, context.device)
    warnings = [*reader.warnings, *([before.warning] if before else [])]
    if before is None and reader.stored_bytes:  # pruned, or a rank's part
        from minivllm.models.load.gguf.packed import conversion_note

        assert source.folder is not None
        warnings.append(conversion_note(source.folder, quant, sizes["quantized_layers"]))
    return Filled(dict(sizes), warnings, reader.stored_bytes)


def _stored_layers(
    source: Source, reader: WeightSource, quant: QuantMethod, model: LlamaForCausalLM
) -> Prequantized | PackedLayers | None:
    """The layers of a checkpoint that are read as it stores them; None: it stores none so."""
    if not isinstance(reader, CheckpointWeights):
        return None
    if source.is_gguf:
        from minivllm.models.load.gguf.packed import PackedLayers
        from minivllm.models.load.gguf.weights import GGUFWeights

        assert isinstance(reader, GGUFWeights)
        return PackedLayers(quant, reader, model)
    if model.config.quantization is not None:
        from minivllm.models.load.prequantized import Prequantized

        return Prequantized(model.config.quantization, quant, reader, model)
    return None


def return_freed_memory() -> None:
    """Let glibc return freed memory to the system: it would count as the process's. Packed weights
    take the places of larger 16-bit ones, and what is left of these is too small for the next."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _sources(path: str, module: nn.Module) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Checkpoint name, shape and rows (of the module's first dimension) of each tensor of a
    module."""
    beside = path.rpartition(".")[0]
    prefix = f"{beside}." if beside else ""
    if isinstance(module, Linear):
        for part, rows in zip(part_names(path, module), module.parts.values(), strict=True):
            yield f"{part}.weight", (rows, module.in_features), rows
            if module.has_bias:
                yield f"{part}.bias", (rows,), rows
    elif isinstance(module, HeadNorm):
        for part, heads in module.parts.items():
            yield f"{prefix}{part}.weight", tuple(module.shape), heads
    elif isinstance(value := getattr(module, "weight", None), nn.Parameter):
        yield f"{path}.weight", tuple(value.shape), value.shape[0]


def tensor_shapes(config: ModelConfig, dtype: torch.dtype) -> Shapes:
    """The tensors of a checkpoint that is not quantised, by name."""
    with torch.device("meta"):
        return expected_shapes(model_class(config.architecture)(config, dtype))


def full_bytes(model: LlamaForCausalLM, dtype: torch.dtype) -> int:
    """Bytes of a model's weights in a dtype."""
    shapes = filter(None, expected_shapes(model).values())
    return dtype.itemsize * sum(map(math.prod, shapes))


def expected_shapes(
    model: LlamaForCausalLM, before: Prequantized | PackedLayers | None = None
) -> Shapes:
    """The tensors that are read as floats: of layers that the checkpoint quantises only the
    biases."""
    held = before.layers if before is not None else {}
    shapes: Shapes = {
        name: shape
        for path, module in model.named_modules()
        for name, shape, _ in _sources(path, module)
        if path not in held or len(shape) == 1
    }
    if model.config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    return shapes


def _fill(
    model: LlamaForCausalLM,
    reader: WeightSource,
    quant: QuantMethod,
    context: BuildContext,
    before: Prequantized | PackedLayers | None,
) -> dict[str, int]:
    """Load the weights of every module. Returns the byte counts of LoadedModel."""
    sizes: Counter[str] = Counter()
    unreturned = 0  # bytes of weights since freed memory was last returned
    held = before.layers if before is not None else {}
    for path, module in list(model.named_modules()):
        if isinstance(module, Linear):
            is_head = path == "lm_head"
            others = before is None or before.quantizes_others
            is_open = not module.exact and (is_head or others)  # the head has a knob
            quantized = path in held or (is_open and quant.quantizes(path))
            shared = (
                model.model.embed_tokens.weight
                if is_head and model.config.tie_word_embeddings
                else None
            )
            if shared is not None and not quantized:
                model.lm_head = tied_linear(shared, context.kernels)
                if isinstance(model.lm_head, PanelLinear):
                    assert context.kernels is not None
                    share_packed(model.model.embed_tokens, model.lm_head, context.kernels)
                sizes["lookup_bytes"] = 0
                continue
            if shared is not None:
                packed = quant.pack(shared.data, None)
            else:
                own = reader.method(path, quant)
                packed = _load_linear(path, module, reader, own, quantized, context, before)
            model.set_submodule(path, packed)
            stored = _stored_bytes(packed)
            full = 2 * sum(
                rows * (module.in_features + module.has_bias) for rows in module.parts.values()
            )
            full *= shared is None  # in 16 bits the head is no copy
            sizes["quantized_layers"] += quantized
            sizes["linear_bytes"] += stored * (not is_head)
            sizes["linear_bytes_16bit"] += full * (not is_head)
        elif isinstance(getattr(module, "weight", None), nn.Parameter):
            value = torch.empty(module.weight.shape, dtype=quant.dtype, device=context.device)
            _fill_rows(path, module, reader, value)
            module.weight = nn.Parameter(value, requires_grad=False)
            stored, full = value.numel() * value.element_size(), 2 * value.numel()
            if module is model.model.embed_tokens:
                sizes["lookup_bytes"] = stored
        else:
            continue
        sizes["weight_bytes"] += stored
        sizes["weight_bytes_16bit"] += full
        unreturned += stored
        if unreturned >= _RETURN_EVERY:
            return_freed_memory()
            unreturned = 0
    return sizes


def _stored_bytes(module: nn.Module) -> int:
    """Bytes of its own parameters and buffers."""
    return sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))


def _load_linear(
    path: str,
    module: Linear,
    reader: WeightSource,
    quant: QuantMethod,
    quantized: bool,
    context: BuildContext,
    before: Prequantized | PackedLayers | None,
) -> nn.Module:
    """Read one (fused) linear layer in the compute dtype, or as it is stored, and make its
    module."""

    def assemble(kind: str, *width: int) -> Tensor:
        rows = sum(module.parts.values())
        whole = torch.empty(rows, *width, dtype=quant.dtype, device=context.device)
        for part, own in zip(
            part_names(path, module), whole.split(list(module.parts.values())), strict=True
        ):
            reader.fill(f"{part}.{kind}", own)
        return whole

    bias = assemble("bias") if module.has_bias else None
    if before is not None and path in before.layers:
        return before.load(path, bias, context.device)
    weight = assemble("weight", module.in_features)
    return quant.pack(weight, bias) if quantized else plain_linear(weight, bias, context.kernels)


def _fill_rows(path: str, module: nn.Module, reader: WeightSource, out: Tensor) -> None:
    """Load an embedding or a norm. A norm of several heads is repeated for each."""
    start = 0
    for name, shape, rows in _sources(path, module):
        if isinstance(module, HeadNorm):
            value = torch.empty(shape, dtype=out.dtype, device=out.device)
            reader.fill(name, value)
            out[start : start + rows] = value
        else:
            reader.fill(name, out)
        start += rows
