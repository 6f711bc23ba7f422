"""The knobs of engine=llamacpp, and what it supports."""

from __future__ import annotations

from dataclasses import dataclass

from minivllm.platform.options import option
from minivllm.platform.support import (
    INTEGERS,
    MODEL,
    NGRAM,
    RUNTIME,
    SEQUENTIAL,
    SERVED_SAMPLING,
    Knobs,
    ServerOptions,
    Support,
)

INSTALL_LLAMA = (
    "build llama.cpp (cmake -B build && cmake --build build --target llama-server) and give "
    "engine.program=PATH, or MINIVLLM_LLAMA_SERVER"
)


@option("minivllm.engines.llamacpp.engine.LlamaServer")
@dataclass(frozen=True)
class LlamaOptions(ServerOptions):
    """engine=llamacpp."""

    support = Support(
        "engine=llamacpp",
        {
            "model": MODEL,
            "quant": INTEGERS,
            "batching": Knobs(
                ("max_num_seqs", "max_num_batched_tokens"),
                (SEQUENTIAL,),
                "batching=sequential, batching.max_num_seqs and max_num_batched_tokens",
            ),
            "cache": Knobs(("block_size", "num_blocks", "prefix_caching", "kv_dtype")),
            "decoding": SERVED_SAMPLING,
            "speculative": Knobs(
                ("num_speculative_tokens", "prompt_lookup_max"),
                (NGRAM,),
                "speculative=ngram with num_speculative_tokens and prompt_lookup_max",
            ),
            "runtime": RUNTIME,
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
    """llama-server, by its name or path."""
    gguf: str | None = None
    """The file with the weights; {type} in it stands for gguf_type, e.g. models/qwen3-{type}.gguf;
    null: the model's, if that is a GGUF file."""
    gguf_type: str | None = None
    """F32, F16, BF16, Q8_0, Q4_0, Q4_K_M, ...; null: what quant means (bf16 BF16, fp16 F16, fp32
    F32, int8 Q8_0, int4 Q4_0)."""
