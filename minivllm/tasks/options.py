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
    """Text to continue; null: read from standard input."""


@option("minivllm.tasks.chat.run")
@dataclass(frozen=True)
class ChatOptions(Options):
    """task=chat."""

    group = "task"
    system: str | None = None
    """System prompt; null: none."""
    thinking: Literal["show", "strip"] = "show"
    """<think> blocks are shown or left out."""
    url: str | None = None
    """Base URL of a server that speaks OpenAI's API, which then answers; null: the engine here."""
    served_model_name: str | None = None
    """The model's name on the server; null: the first in the server's list."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable with the key, if the server needs one."""

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
    """The first rate tried, requests per second."""
    min_rate: float | None = knob(None, above=0)
    """The lowest rate tried (each lower one takes twice as long); null: start_rate / 8."""
    attainment: float = knob(0.9, above=0, at_most=0.999)
    """Share of the requests that must meet every objective."""
    confidence: float = knob(0.95, at_least=0.5, at_most=0.999)
    """Confidence of a verdict on a rate."""
    tolerance: float = knob(0.05, at_least=0.005)
    """Relative distance of the last two rates, one that holds and one that does not."""
    max_blocks: int = knob(32, at_least=1)
    """Most measurements of an undecided rate, each with another seed; a rate holds after 10, 20 or
    32."""
    max_rates: int = knob(16, at_least=2)
    """Most rates tried."""


@option("minivllm.tasks.compare.run")
@dataclass(frozen=True)
class CompareOptions(Options):
    """task=compare."""

    group = "task"
    metric: str | None = None
    """What is compared, a field below `metrics` in a record; null: output_tokens_per_s, or, where
    requests come at a pace of their own that is kept up with, so that the load sets the throughput,
    the latencies."""
    threshold: float = knob(0.02, at_least=0)
    """Smaller relative changes do not count, however certain."""
    margin: float = knob(0.25, at_least=0)
    """Where nothing was found, a greater loss than this has to be excluded, or the cell is
    undecided (exit code 3)."""


@option("minivllm.tasks.convert.run")
@dataclass(frozen=True)
class ConvertOptions(Options):
    """task=convert."""

    group = "task"
    output: str
    """The new folder for the weights, the configuration and the tokenizer."""
    timeout_s: float = knob(3600.0, above=0)
    """Longest time for one file."""
    memory_gb: float | None = knob(None, above=0)
    """Most memory for one file; null: three times its size, and 1 GiB."""


@option("view")
@dataclass(frozen=True)
class ViewOptions(Options):
    """view: how task=view shows recorded steps."""

    group = "view"
    trace: bool = False
    """true: also as Chrome traces, for https://ui.perfetto.dev."""
    tui: bool = False
    """true: in this terminal instead of a page."""
    speed: float = knob(1.0, above=0)
    """Speed of the terminal's replay; 2: twice as fast as it was."""


@option("minivllm.tasks.view.run")
@dataclass(frozen=True)
class ViewTaskOptions(Options):
    """task=view."""

    group = "task"
    url: str | None = None
    """Address of a running server, such as http://127.0.0.1:8000, or of its events, for
    view.tui=true; null: 'runs'."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable with the server's key, if it needs one."""

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
    """Rows of a product, or decoding sequences."""
    contexts: list[int] = field(default_factory=lambda: [512, 2048])
    """Tokens of a sequence or a prompt."""
    drafts: int = knob(4, at_least=0)
    """Draft tokens that attention verifies, beside the last token; 0: verification is not timed."""
    formats: list[Literal["bf16", "int8", "int4", "nf4", "w8a8", "w4a8"]] = field(
        default_factory=lambda: ["bf16", "int8", "int4", "nf4", "w8a8", "w4a8"]
    )
    """Formats of weights; w8a8 and w4a8: int8 and int4 with 8-bit activations."""
    repeats: int = knob(15, at_least=1)
    """Samples of each kernel and each reference, in turn; 6 are needed for an interval."""
    sample_ms: float = knob(10.0, above=0)
    """Time of one sample, which is several calls."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("rows", "contexts"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise self.bad(name, "must be a list of whole numbers of at least 1")
