"""The knobs of `task`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from minivllm.platform.options import Options, knob, option


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
    """task=chat.

    Args:
        system: the system prompt; None is none.
        thinking: whether thinking blocks are shown.
        url: of a server that speaks OpenAI's API, which answers instead of an engine here.
        served_model_name: the model's name on the server; None is the first that it lists.
        api_key_env: environment variable with the server's key; none is sent where it is not set.
    """

    group = "task"
    system: str | None = None
    thinking: Literal["show", "strip"] = "show"
    url: str | None = None
    served_model_name: str | None = None
    api_key_env: str = "OPENAI_API_KEY"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.url is not None and not re.match(r"https?://[^/]", self.url):
            raise self.bad("url", "must begin with http:// or https://")
        if self.url is None and self.served_model_name is not None:
            raise self.bad("served_model_name", "names a model of a server: give task.url, too")


@option("minivllm.tasks.capacity.run")
@dataclass(frozen=True)
class CapacityOptions(Options):
    """task=capacity."""

    group = "task"
    start_rate: float = knob(1.0, above=0)
    min_rate: float | None = knob(None, above=0)
    attainment: float = knob(0.9, above=0, at_most=0.999)
    confidence: float = knob(0.95, at_least=0.5, at_most=0.999)
    tolerance: float = knob(0.05, at_least=0.005)
    max_blocks: int = knob(32, at_least=1)
    max_rates: int = knob(16, at_least=2)


@option("minivllm.tasks.compare.run")
@dataclass(frozen=True)
class CompareOptions(Options):
    """task=compare."""

    group = "task"
    metric: str | None = None
    threshold: float = knob(0.02, at_least=0)
    margin: float = knob(0.25, at_least=0)


@option("minivllm.tasks.convert.run")
@dataclass(frozen=True)
class ConvertOptions(Options):
    """task=convert."""

    group = "task"
    output: str
    timeout_s: float = knob(3600.0, above=0)
    memory_gb: float | None = knob(None, above=0)


@option("view")
@dataclass(frozen=True)
class ViewOptions(Options):
    """view: how task=view shows recorded steps.

    Args:
        trace: whether to write Chrome traces, too.
        tui: whether to show them in the terminal instead of a page.
        speed: of the terminal's replay.
    """

    group = "view"
    trace: bool = False
    tui: bool = False
    speed: float = knob(1.0, above=0)


@option("minivllm.tasks.view.run")
@dataclass(frozen=True)
class ViewTaskOptions(Options):
    """task=view.

    Args:
        url: of a running server, whose events are shown in the terminal: its address, or that of
            the events.
        api_key_env: environment variable with the server's key; none is sent where it is not set.
    """

    group = "task"
    url: str | None = None
    api_key_env: str = "OPENAI_API_KEY"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.url is not None and not re.match(r"(wss?|https?)://[^/]", self.url):
            raise self.bad("url", "must begin with ws://, wss://, http:// or https://")


@option("minivllm.tasks.kernels.run")
@dataclass(frozen=True)
class KernelsOptions(Options):
    """task=kernels."""

    group = "task"
    rows: list[int] = field(default_factory=lambda: [1, 4, 16, 64])
    contexts: list[int] = field(default_factory=lambda: [512, 2048])
    drafts: int = knob(4, at_least=0)
    formats: list[Literal["bf16", "int8", "int4", "nf4", "w8a8", "w4a8"]] = field(
        default_factory=lambda: ["bf16", "int8", "int4", "nf4", "w8a8", "w4a8"]
    )
    repeats: int = knob(15, at_least=1)
    sample_ms: float = knob(10.0, above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rows", "contexts"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise self.bad(name, "must be a list of whole numbers of at least 1")
