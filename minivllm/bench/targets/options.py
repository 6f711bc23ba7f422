"""The knobs of `engine`: what is measured."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from minivllm.platform.options import Options, knob, option


@option("minivllm.bench.targets.minivllm.MinivllmEngine")
@dataclass(frozen=True)
class MinivllmOptions(Options):
    """engine=minivllm: its knobs are the other groups."""

    group = "engine"


@option("minivllm.bench.targets.transformers.TransformersEngine")
@dataclass(frozen=True)
class TransformersOptions(Options):
    """engine=transformers."""

    group = "engine"
    mode: Literal["generate", "static_cache"] = "generate"
    compile: bool = False
    batch_size: int = knob(32, at_least=1)
    attn_implementation: Literal[
        "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"
    ] = "sdpa"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compile and self.mode != "static_cache":
            raise self.bad(
                "compile", "needs engine.mode=static_cache: transformers compiles no growing cache"
            )


@option("minivllm.bench.targets.transformers_continuous.TransformersContinuousEngine")
@dataclass(frozen=True)
class TransformersContinuousOptions(Options):
    """engine=transformers_continuous."""

    group = "engine"
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "sdpa"
    compile_level: int = knob(0, at_least=0, at_most=3)


@option("minivllm.bench.targets.vllm.VllmEngine")
@dataclass(frozen=True)
class VllmOptions(Options):
    """engine=vllm."""

    group = "engine"
    python: str | None = None
    kv_cache_gb: float | None = knob(None, above=0)
    args: dict[str, Any] | None = None
    env: dict[str, Any] | None = None


@option("minivllm.bench.targets.openai.OpenAIEngine")
@dataclass(frozen=True)
class OpenAIOptions(Options):
    """engine=openai."""

    group = "engine"
    url: str = "http://127.0.0.1:8000/v1"
    model: str | None = None
    command: str | None = None
    start_timeout_s: float = knob(600.0, above=0)
    api_key_env: str = "OPENAI_API_KEY"
    prompt: Literal["auto", "ids", "text"] = "auto"
    max_connections: int = knob(256, at_least=1)
    extra: dict[str, Any] | None = None
    cache_reset: str | None = None
    idle_timeout_s: float = knob(300.0, above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.match(r"https?://[^/]", self.url):
            raise self.bad("url", "must begin with http:// or https://, and end before /completions")


@option("minivllm.bench.targets.simulated.SimulatedEngine")
@dataclass(frozen=True)
class SimulatedOptions(Options):
    """engine=simulated."""

    group = "engine"
    steps: str | None = None
    bandwidth_gb_s: float | None = knob(None, above=0)
    tflops: float | None = knob(None, above=0)
    overhead_ms: float = knob(0.0, at_least=0)
    memory_gb: float | None = knob(None, above=0)
    host_gb_s: float | None = knob(None, above=0)
    step_rows: int = knob(100_000, at_least=2)
