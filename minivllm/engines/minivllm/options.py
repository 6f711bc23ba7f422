"""What engine=minivllm supports: every knob of the other groups."""

from __future__ import annotations

from dataclasses import dataclass

from minivllm.platform.options import option
from minivllm.platform.support import EVERY_KNOB, EngineOptions, Support


@option("minivllm.engines.minivllm.engine.MinivllmEngine")
@dataclass(frozen=True)
class MinivllmOptions(EngineOptions):
    """engine=minivllm: its knobs are the other groups."""

    support = Support(
        "engine=minivllm",
        EVERY_KNOB,
        own_torch=True,
        replicated=True,
    )
