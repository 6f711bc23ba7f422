"""Loading: a model is built on the meta device and filled, one tensor at a time, on its device in
its dtype."""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minivllm.errors import BadInput
from minivllm.kernels.context import BuildContext
from minivllm.kernels.cpu.library import Kernels
from minivllm.kernels.cpu.linear import PanelLinear
from minivllm.models.config import ModelConfig, require_experts
from minivllm.models.cpu_layers import share_packed
from minivllm.models.families.llama import LlamaForCausalLM
from minivllm.models.layers import HeadNorm, Linear
from minivllm.models.load.generation import decoding_defaults
from minivllm.models.load.gguf.checkpoint import GGUFCheckpoint, open_checkpoint
from minivllm.models.load.gguf.packed import PackedLayers
from minivllm.models.load.gguf.weights import GGUFWeights
from minivllm.models.load.packed_cache.cache import Filled, PackedCache, packed_cache
from minivllm.models.load.prequantized import Prequantized, part_names
from minivllm.models.load.source import Source, resolve
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.models.load.weights import (
    CheckpointWeights,
    LoadTransform,
    Progress,
    RandomWeights,
    WeightSource,
)
from minivllm.models.options import ModelOptions
from minivllm.models.pass_report import PassReport
from minivllm.models.registry import model_class
from minivllm.models.vision.registry import LoadedVision, image_processor, sees, vision_tower
from minivllm.models.vision.tower import VisionTower
from minivllm.quant.base import Method, QuantMethod
from minivllm.quant.plain import plain_linear, tied_linear
from minivllm.quant.stored.format import Shapes

_RETURN_EVERY = 64 << 20  # bytes of weights


@dataclass
class LoadedModel:
    """A model ready to run, and the facts that its loading showed."""

    model: LlamaForCausalLM
    config: ModelConfig
    max_model_len: int
    tokenizer: Tokenizer | None  # None if the folder has none, or there is no folder
    weights: str  # "checkpoint" | "random"
    fingerprint: str
    weight_bytes: int  # as stored now, tied weights once
    # Of these, an embedding that is not the head, too: a step reads one row of it for each token.
    lookup_bytes: int
    weight_bytes_16bit: int  # the same tensors at 2 bytes a value
    linear_bytes: int  # of the linear layers without the head
    linear_bytes_16bit: int
    quantized_layers: int  # the head included, if it is quantised
    # Width of each linear layer's input, by name.
    linear_inputs: dict[str, int] = field(default_factory=dict)
    kernels: Kernels | None = None  # C++ kernels of its layers
    # Fields of SamplingParams from generation_config.json.
    decoding_defaults: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    stored_bytes: dict[str, int] = field(default_factory=dict)  # of a GGUF file, by its formats
    passes: list[PassReport] = field(default_factory=list)  # reports of passes, in order
    vision: LoadedVision | None = None  # of a model that takes images
    folder: Path | None = None  # or the GGUF file, that weights were read from
    packed_cache: str = "off"  # see PackedCache.outcome
    packed_write_s: float | None = None


def load_model(
    options: ModelOptions,
    *,
    quant: QuantMethod,
    context: BuildContext,
    progress: Progress | None = None,
    transform: LoadTransform | None = None,
) -> LoadedModel:
    """Load a checkpoint, or build its architecture with random weights.

    Args:
        options: the knobs of `model`.
        quant: how linear layers are stored; also sets the compute dtype.
        context: where the model runs and with which kernels; `moe="grouped"` requires experts.
        progress: called with the progress of the weights, as (done, total).
        transform: changes the model while it is loaded.

    Raises:
        BadInput: the source is not usable, a tensor does not fit, max_model_len is too long, the
            checkpoint is quantised in another way than `quant`, or experts are missing.
    """
    _, source = resolve(vars(options), allow_random=False)
    whole = ModelConfig.from_dict(source.config)
    config = whole if transform is None else ModelConfig.from_dict(transform.config)
    length = config.context(options.max_model_len)
    require_experts(context.moe, config.num_experts)
    if isinstance(quant, Method):
        quant = quant.within(context)
    if transform is not None and whole.quantization is not None:
        raise BadInput("pruning: this checkpoint is quantised already; prune the 16-bit checkpoint")
    if transform is not None and sees(config.architecture):
        raise BadInput("pruning: models that take images are not pruned; use pruning=none")

    def open_weights() -> WeightSource:
        reader = _reader(source, options.seed, progress)
        if transform is None:
            return reader
        return transform.weights(reader, tensor_shapes(whole, quant.dtype))

    cache = packed_cache(options, source, quant, context, transform is not None)
    loaded = _load(source, config, length, quant, context, open_weights, cache)
    _return_freed_memory()
    loaded.model.make_rotary(length, context.device)
    return loaded


def _reader(source: Source, seed: int, progress: Progress | None) -> WeightSource:
    """The weights of a source."""
    if source.weights != "checkpoint":
        return RandomWeights(seed, progress)
    assert source.folder is not None
    checkpoint = open_checkpoint(source.folder)
    if not isinstance(checkpoint, GGUFCheckpoint):
        return CheckpointWeights(checkpoint, progress)
    reader = GGUFWeights(checkpoint, progress)
    reader.stored_bytes = checkpoint.stored_bytes()
    return reader


def _load(
    source: Source,
    config: ModelConfig,
    length: int,
    quant: QuantMethod,
    context: BuildContext,
    open_weights: Callable[[], WeightSource],
    cache: PackedCache,
) -> LoadedModel:
    """A model with its weights; see `load_model`. The memory of the reader is free afterwards."""
    # Before the weights, so that a mistake in these files is reported at once.
    tokenizer, decoding = Tokenizer.load(source.folder), decoding_defaults(source.folder)
    with torch.device("meta"):
        model = model_class(config.architecture)(config, quant.dtype)
    linears = {path: part for path, part in model.named_modules() if isinstance(part, Linear)}
    _check_skip(linears, quant)
    widths = {path: linear.in_features for path, linear in linears.items()}
    with torch.device("meta"):
        tower = vision_tower(source.config)
    processor = None if tower is None else image_processor(source.config, source.folder)
    if tower is not None:
        cache = PackedCache(outcome="off: models that take images are not kept")
    filled = cache.restore(model, linears)
    if filled is None:
        filled = _filled(model, tower, open_weights(), quant, context)
        cache.keep(model, linears, filled)
    vision = None
    if tower is not None and processor is not None:
        vision = LoadedVision(tower.eval(), source.config, source.folder, processor)
    return LoadedModel(
        model=model.eval(),
        config=config,
        max_model_len=length,
        tokenizer=tokenizer,
        weights=source.weights,
        fingerprint=source.fingerprint,
        decoding_defaults=decoding,
        linear_inputs=widths,
        stored_bytes=filled.stored_bytes,
        passes=[],
        kernels=context.kernels,
        vision=vision,
        warnings=[*source.warnings, *filled.warnings, *cache.warnings],
        folder=source.weights_from,
        packed_cache=cache.outcome,
        packed_write_s=cache.write_s,
        **filled.sizes,
    )


def _filled(
    model: LlamaForCausalLM,
    tower: VisionTower | None,
    reader: WeightSource,
    quant: QuantMethod,
    context: BuildContext,
) -> Filled:
    """Load the weights of a model and its tower on the meta device."""
    config = model.config
    before: Prequantized | PackedLayers | None = None
    if isinstance(reader, GGUFWeights):
        before = PackedLayers(quant, reader, model)
    elif isinstance(reader, CheckpointWeights) and config.quantization is not None:
        before = Prequantized(config.quantization, quant, reader, model)
    stored = before.shapes if before is not None else {}
    shapes = _expected_shapes(model, before) | ({} if tower is None else tower.shapes)
    reader.check(shapes | stored, config.tie_word_embeddings, stored)
    sizes = _fill(model, reader, quant, context, before)
    if tower is not None:
        tower.fill(reader.fill, quant.dtype, context.device)
    warnings = [*reader.warnings, *([before.warning] if before else [])]
    return Filled(dict(sizes), warnings, reader.stored_bytes)


def _return_freed_memory() -> None:
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
        return _expected_shapes(model_class(config.architecture)(config, dtype))


def _expected_shapes(
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


def _check_skip(names: Collection[str], quant: QuantMethod) -> None:
    """Check that each entry of `skip` is a part of some linear layer's name.

    Raises:
        BadInput: an entry is in no name.
    """
    for part in quant.skip:
        if not any(part in name for name in names):
            leaves = sorted({name.rpartition(".")[2] for name in names})
            raise BadInput(
                f"quant.skip: {part!r} is in no layer's name; the layers are {', '.join(leaves)}"
            )


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
            _return_freed_memory()
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
