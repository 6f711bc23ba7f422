"""A transformers model for the same `model` node that this project's engine loads."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from minivllm.config.groups import Config
from minivllm.engines.base import Adapter, EngineInfo
from minivllm.engines.engine_pictures import EnginePictures
from minivllm.engines.supported_knobs import require_supported
from minivllm.engines.transformers.options import (
    TransformersContinuousOptions,
    TransformersOptions,
)
from minivllm.errors import BadInput, first_line
from minivllm.extras.vision.options import VisionOptions
from minivllm.kernels.device import select_device
from minivllm.models.config import ModelConfig
from minivllm.models.costs import model_costs
from minivllm.models.load.names import own_name
from minivllm.models.load.source import Source, resolve
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.models.load.weights import VISION, RandomWeights
from minivllm.models.registry import sees
from minivllm.models.vision.inputs import ProcessedImage
from minivllm.models.vision.registry import vision_tower
from minivllm.platform.support import INSTALL
from minivllm.platform.threads import thread_count


@dataclass
class Pretrained:
    """A loaded transformers model, ready to generate.

    Its own generation config is blank, so that nothing of a checkpoint's generation_config.json
    (sampling, as many have it) is mixed into a request's own.
    """

    model: Any
    config: ModelConfig
    source: Source
    max_model_len: int
    device: torch.device
    dtype: str  # "bfloat16" | "float16" | "float32"

    @property
    def attn_implementation(self) -> str:
        """The attention that transformers settled on."""
        return str(self.model.config._attn_implementation)

    def describe(self, name: str, load_s: float, max_num_seqs: int) -> EngineInfo:
        """What the engine `name` around this model says of itself."""
        config = self.config
        parameters = list(self.model.parameters())  # tied weights once
        count = sum(p.numel() for p in parameters)
        size = sum(p.numel() * p.element_size() for p in parameters)
        seeing = [
            p for name, p in self.model.named_parameters() if own_name(name).startswith(VISION)
        ]
        seen, seen_size = sum(p.numel() for p in seeing), sum(p.nbytes for p in seeing)
        embedding: torch.Tensor = self.model.get_input_embeddings().weight
        # A tied head reads the embedding's storage for every token, a separate embedding is only
        # looked up.
        idle = 0 if config.tie_word_embeddings else embedding.numel()
        linear = self._linear_parameters()
        return EngineInfo(
            name=name,
            weights=self.source.weights,
            fingerprint=self.source.fingerprint,
            weights_from=self.source.weights_from,
            vocab_size=config.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=config.eos_token_ids,
            max_num_seqs=max_num_seqs,
            load_s=load_s,
            memory={
                "weights": size,
                "weights_16bit": 2 * count,
                "linear": sum(p.numel() * p.element_size() for p in linear),
                "linear_16bit": 2 * sum(p.numel() for p in linear),
                "kv_pool": None,  # transformers' cache grows with the batch
            },
            model=model_costs(
                vars(config),
                count - idle - seen,
                size - idle * embedding.element_size() - seen_size,
                self.dtype,
                str(self.device),
                windows=config.windows,
            ),
            attention_backend=self.attn_implementation,
            warnings=list(self.source.warnings),
        )

    def pictures(
        self, tokenizer: Tokenizer | None, options: VisionOptions
    ) -> EnginePictures | None:
        """The images of requests, processed as this project's engine does it, which is equal to
        transformers' to the bit; None for a model that takes none."""
        return EnginePictures.of_source(self.source, tokenizer, options)

    def encoder_flops(self, prompts: Sequence[Sequence[ProcessedImage]]) -> float:
        """Operations of the tower on the images of prompts, which transformers computes again
        for every call of generate."""
        with torch.device("meta"):
            tower = vision_tower(self.source.config)
        assert tower is not None
        return sum(tower.flops(image) for images in prompts for image in images)

    def _linear_parameters(self) -> list[nn.Parameter]:
        """Of the layers' linear layers alone, without the head; a mixture has classes of its own
        for them."""
        head = self.model.get_output_embeddings()
        modules = [m for m in self.model.modules() if isinstance(m, nn.Linear) and m is not head]
        ends = (".experts.gate_up_proj", ".experts.down_proj", ".mlp.gate.weight")
        mixture = [
            parameter for name, parameter in self.model.named_parameters() if name.endswith(ends)
        ]
        return [parameter for module in modules for parameter in module.parameters()] + mixture


class PretrainedEngine(Adapter):
    """Base of the engines around a transformers model.

    Args:
        config: the resolved configuration.
        options: the knobs of `engine`.

    Raises:
        BadInput: a knob is set that is not supported, transformers is missing, or the model cannot
            be loaded.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        options: TransformersOptions | TransformersContinuousOptions,
    ) -> None:
        require_supported(config, options.support)
        peer = options.support.engine
        self._transformers = import_transformers(peer)
        self._begin_s = time.monotonic()
        self._view = Config.of(config)
        self._loaded = load(self._view, options.attn_implementation, peer)
        self.tokenizer = Tokenizer.load(self._loaded.source.folder)

    def _describe(self, name: str, max_num_seqs: int, note: str) -> None:
        """Set `info`, once the engine is ready."""
        load_s = time.monotonic() - self._begin_s
        self.info = self._loaded.describe(name, load_s, max_num_seqs)
        self.info.warnings.append(note)

    def _quant(self) -> dict[str, float | str]:
        """The counters of `quant`; see `BenchEngine.liveness`."""
        return {
            "dtype": str(self.info.model["dtype"]),
            "layers_quantised": 0.0,
            "linear_bytes": float(self.info.memory["linear"] or 0),
        }

    def _restart_peak(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def _release(self) -> None:
        del self._loaded
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def load(config: Config, attn_implementation: str, peer: str) -> Pretrained:
    """Load the configuration's model with transformers.

    Random weights are the very ones that this project's engine makes from the same seed.

    Args:
        config: the resolved configuration; `model`, the dtype of `quant` and `runtime` are used.
        attn_implementation: as transformers names it.
        peer: names the engine in messages.

    Raises:
        BadInput: transformers is missing, or the model, device or attention cannot be used.
    """
    transformers = import_transformers(peer)
    device = select_device(config.runtime.device)
    torch.set_num_threads(thread_count(config["runtime"]))
    _, source = resolve(config["model"], allow_random=False)
    source.reject_gguf(peer)
    dtype = config.quant.dtype
    sizes = ModelConfig.from_dict(source.config)
    if sizes.quantization is not None:
        raise BadInput(f"the checkpoint is already quantised; {peer} takes 16-bit checkpoints")
    length = sizes.context(config.model.max_model_len)
    options = {"dtype": getattr(torch, dtype), "attn_implementation": attn_implementation}
    try:
        if source.weights == "checkpoint":
            model = _from_folder(transformers, source, device, options, peer)
        else:
            model = _random(transformers, source, device, options, config.model.seed)
    except (ImportError, ValueError) as error:
        line = first_line(error)
        raise BadInput(
            "transformers cannot load this model with "
            f"attn_implementation={attn_implementation}: {line}"
        ) from error
    model.generation_config = transformers.GenerationConfig()
    return Pretrained(model.eval(), sizes, source, length, device, dtype)


def import_transformers(peer: str) -> Any:
    """The library, which then draws no progress bars into the log. Raises BadInput where it is
    missing."""
    try:
        import transformers
        from transformers.utils import logging
    except ImportError as error:
        raise BadInput(f"{peer} needs transformers ({error}): {INSTALL}") from error
    logging.disable_progress_bar()
    return transformers


def _from_folder(
    transformers: Any, source: Source, device: torch.device, options: dict[str, Any], peer: str
) -> Any:
    if device.type != "cpu":
        if find_spec("accelerate") is None:
            raise BadInput(f"{peer} needs accelerate to load onto {device}: {INSTALL}")
        options = {**options, "device_map": {"": device}}  # straight there, never whole on the host
    return _auto(transformers, source).from_pretrained(
        source.folder, local_files_only=True, use_safetensors=True, **options
    )


def _auto(transformers: Any, source: Source) -> Any:
    """The class that loads models of the source's kind."""
    if sees(str(source.config["architectures"][0])):
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def _random(
    transformers: Any, source: Source, device: torch.device, options: dict[str, Any], seed: int
) -> Any:
    """The architecture with random weights, made on its device in its dtype."""
    from transformers.initialization import no_init_weights

    architecture = str(source.config["architectures"][0])
    if not hasattr(transformers, architecture):
        raise BadInput(f"this version of transformers has no {architecture}: {INSTALL} --upgrade")
    # A published config.json may lack model_type, which the model's class tells, too.
    config = getattr(transformers, architecture).config_class.from_dict(source.config)
    # On the device itself and not on the meta device: the rotary tables are computed here and must
    # be real.
    with device, no_init_weights():
        model = _auto(transformers, source).from_config(config, **options)
    model.tie_weights()
    weights = RandomWeights(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for stored, part in _as_stored(name, parameter):
                weights.fill(stored, part)
    return model


def _as_stored(name: str, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """A parameter under the names of the models here, where the parts of a model with images have
    others. A mixture's experts are one tensor there and
    many here."""
    name = own_name(name)
    mixture, inside, part = name.partition(".mlp.experts.")
    if not inside:
        yield name, parameter
        return
    for i, expert in enumerate(parameter):
        names = ("down_proj",) if part == "down_proj" else ("gate_proj", "up_proj")
        for piece, weight in zip(names, expert.chunk(len(names)), strict=True):
            yield f"{mixture}{inside}{i}.{piece}.weight", weight
