"""Loading: a model is found, built on the meta device and filled with its weights, or with those
that were packed before."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from minivllm.errors import BadInput
from minivllm.kernels.cpu.library import Kernels
from minivllm.kernels.device import BuildContext
from minivllm.models.config import ModelConfig, require_experts
from minivllm.models.families.llama import LlamaForCausalLM
from minivllm.models.layers import Linear
from minivllm.models.load.checkpoint import Checkpoint
from minivllm.models.load.filling import (
    Filled,
    filled_model,
    full_bytes,
    return_freed_memory,
    tensor_shapes,
)
from minivllm.models.load.generation import decoding_defaults
from minivllm.models.load.source import Source, resolve
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.models.load.weights import (
    CheckpointWeights,
    LoadTransform,
    Progress,
    RandomWeights,
    WeightSource,
)
from minivllm.models.options import AUTO, OFF, ModelOptions
from minivllm.models.registry import model_class, sees
from minivllm.quant.base import Method, QuantMethod

if TYPE_CHECKING:
    from minivllm.models.load.packed_cache.cache import PackedCache
    from minivllm.models.vision.registry import LoadedVision

# Bytes of packed weights that model.packed_cache=auto keeps: fewer are packed in no time.
SMALLEST = 64 << 20


@dataclass(frozen=True)
class PassReport:
    """What one pass changed."""

    name: str
    count: int = 0  # modules that it replaced or changed
    bytes: int = 0  # growth of the model's memory; negative where it shrank
    seconds: float = 0.0  # duration; `apply_passes` measures it if the pass leaves it 0
    notes: tuple[str, ...] = ()  # warnings for the record
    # Further counts by name, which the pass may change while requests are served.
    counters: Mapping[str, int] = field(default_factory=dict)


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

    with torch.device("meta"):
        model = model_class(config.architecture)(config, quant.dtype)
    cache = _packed_cache(options, source, model, quant, context, transform is not None)
    loaded = _load(source, model, length, quant, context, open_weights, cache)
    return_freed_memory()
    loaded.model.make_rotary(length, context.device)
    return loaded


def _reader(source: Source, seed: int, progress: Progress | None) -> WeightSource:
    """The weights of a source."""
    if source.weights != "checkpoint":
        return RandomWeights(seed, progress)
    assert source.folder is not None
    if not source.is_gguf:
        return CheckpointWeights(Checkpoint.open(source.folder), progress)
    from minivllm.models.load.gguf.weights import open_weights

    return open_weights(source.folder, progress)


@dataclass
class NotKept:
    """Packed weights that no file keeps, in the place of a PackedCache."""

    outcome: str
    warnings: tuple[str, ...] = ()
    write_s: float | None = None

    def restore(self, model: LlamaForCausalLM, linears: Collection[str]) -> Filled | None:
        return None

    def keep(self, model: LlamaForCausalLM, linears: Collection[str], filled: Filled) -> None:
        pass


def _packed_cache(
    options: ModelOptions,
    source: Source,
    model: LlamaForCausalLM,
    quant: QuantMethod,
    context: BuildContext,
    changed: bool,
) -> PackedCache | NotKept:
    """Where packed weights are kept. Raises BadInput where the folder that the knob names cannot be
    written to.

    Args:
        changed: whether the model is changed while it is loaded.
    """
    off, is_named = "", options.packed_cache not in (OFF, AUTO)
    if options.packed_cache == OFF:
        off = OFF
    elif context.kernels is None or not context.kernels.has_linear:
        off = f"{OFF}: the C++ kernels for CPUs are not in use"
    elif changed:
        off = f"{OFF}: weights that are pruned or split are not kept"
    elif not isinstance(quant, Method) or not type(quant).__module__.startswith("minivllm."):
        off = f"{OFF}: the quantisation method is not minivllm's own"
    elif sees(model.config.architecture):
        off = f"{OFF}: models that take images are not kept"
    elif not is_named and full_bytes(model, quant.dtype) < SMALLEST:
        off = f"{OFF}: the model is small"  # in the compute dtype, and so it is packed
    if off and not is_named:
        return NotKept(off)
    from minivllm.models.load.packed_cache.cache import packed_cache

    return packed_cache(options, source, quant, context.kernels, off, 0 if is_named else SMALLEST)


def _load(
    source: Source,
    model: LlamaForCausalLM,
    length: int,
    quant: QuantMethod,
    context: BuildContext,
    open_weights: Callable[[], WeightSource],
    cache: PackedCache | NotKept,
) -> LoadedModel:
    """A model on the meta device, with its weights; see `load_model`. The memory of the reader is
    free afterwards."""
    # Before the weights, so that a mistake in these files is reported at once.
    tokenizer, decoding = Tokenizer.load(source.folder), decoding_defaults(source.folder)
    linears = {path: part for path, part in model.named_modules() if isinstance(part, Linear)}
    _check_skip(linears, quant)
    widths = {path: linear.in_features for path, linear in linears.items()}
    vision = _vision(source) if sees(model.config.architecture) else None
    filled = cache.restore(model, linears)
    if filled is None:
        filled = filled_model(source, model, vision, open_weights(), quant, context)
        cache.keep(model, linears, filled)
    return LoadedModel(
        model=model.eval(),
        config=model.config,
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


def _vision(source: Source) -> LoadedVision:
    """What a model sees with, its tower on the meta device."""
    from minivllm.models.vision.registry import LoadedVision, image_processor, vision_tower

    with torch.device("meta"):
        tower = vision_tower(source.config)
    assert tower is not None
    processor = image_processor(source.config, source.folder)
    return LoadedVision(tower.eval(), source.config, source.folder, processor)


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
