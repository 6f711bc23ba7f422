"""The knobs of `model`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minivllm.platform.options import Options, knob, option


@option("minivllm.models.load.loading.load_model")
@dataclass(frozen=True)
class ModelOptions(Options):
    """Every option of model; `architecture` is the published config.json, checked by the model, as
    is `rope_scaling`."""

    group = "model"
    path: str
    weights: str = "auto"
    max_model_len: int | None = knob(None, at_least=1)
    seed: int = knob(0, at_least=0)
    rope_scaling: dict[str, Any] | None = knob(None, unasked=True)
    architecture: dict[str, Any] | None = None
