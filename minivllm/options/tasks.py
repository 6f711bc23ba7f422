"""The knobs of `task`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from minivllm.options.base import Options, option


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
