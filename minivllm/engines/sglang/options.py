"""The knobs of engine=sglang, and what it supports."""

from __future__ import annotations

from dataclasses import dataclass

from minivllm.platform.options import option
from minivllm.platform.support import (
    FP8,
    MODEL,
    NGRAM,
    RUNTIME,
    SERVED_BATCHING,
    SERVED_SAMPLING,
    Knobs,
    ServerOptions,
    Support,
)

INSTALL_SGLANG = "python3 -m venv ~/sglang && ~/sglang/bin/pip install sglang"


@option("minivllm.engines.sglang.engine.SglangServer")
@dataclass(frozen=True)
class SglangOptions(ServerOptions):
    """engine=sglang."""

    support = Support(
        "engine=sglang",
        {
            "model": MODEL,
            "quant": Knobs(("dtype",), (FP8,), "quant=bf16, fp16, fp32 or fp8"),
            "batching": SERVED_BATCHING,
            "cache": Knobs(("block_size", "prefix_caching", "kv_dtype")),
            "decoding": SERVED_SAMPLING,
            "speculative": Knobs(
                ("num_speculative_tokens",),
                (NGRAM,),
                "speculative=ngram with num_speculative_tokens",
            ),
            "runtime": RUNTIME,
            "parallel": Knobs(("tensor", "replicas")),
        },
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
    """The interpreter that has SGLang, e.g. $HOME/sglang/bin/python."""
