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
    is `rope_scaling`.

    Args:
        packed_cache: folder of weights as the CPU's kernels read them; "auto" is one in the user's
            cache folder, without small models; "off" packs them at each start.
        packed_cache_gb: most gigabytes (1e9 bytes) of that folder; the files that were not used for
            the longest time are removed.
    """

    group = "model"
    path: str
    weights: str = "auto"
    max_model_len: int | None = knob(None, at_least=1)
    seed: int = knob(0, at_least=0)
    rope_scaling: dict[str, Any] | None = knob(None, unasked=True)
    architecture: dict[str, Any] | None = None
    packed_cache: str = knob(AUTO, unasked=True)
    packed_cache_gb: float = knob(32.0, above=0, unasked=True)
