"""The knobs of `task`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from minivllm.options.base import Options, knob, option


@option("minivllm.tasks.bench.run", "minivllm.tasks.quality.run", "minivllm.tasks.report.run")
@dataclass(frozen=True)
class PlainTaskOptions(Options):
    """A task that has no knobs of its own."""

    group = "task"


@option("minivllm.tasks.generate.run")
@dataclass(frozen=True)
class GenerateOptions(Options):
    """task=generate."""

    group = "task"
    prompt: str | None = None


@option("minivllm.tasks.chat.run")
@dataclass(frozen=True)
class ChatOptions(Options):
    """task=chat."""

    group = "task"
    system: str | None = None
    thinking: Literal["show", "strip"] = "show"


@option("minivllm.tasks.capacity.run")
@dataclass(frozen=True)
class CapacityOptions(Options):
    """task=capacity."""

    group = "task"
    start_rate: float = knob(1.0, above=0)
    attainment: float = knob(0.9, above=0, at_most=0.999)
    confidence: float = knob(0.95, at_least=0.5, at_most=0.999)
    tolerance: float = knob(0.05, at_least=0.005)
    max_blocks: int = knob(3, at_least=1)
    max_rates: int = knob(16, at_least=2)


@option("minivllm.tasks.compare.run")
@dataclass(frozen=True)
class CompareOptions(Options):
    """task=compare."""

    group = "task"
    metric: str = "output_tokens_per_s"
    threshold: float = knob(0.02, at_least=0)
