"""The knobs of engine=transformers and transformers_continuous, and what they support."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from minivllm.platform.options import knob, option
from minivllm.platform.support import (
    MODEL,
    PRECISION,
    RUNTIME,
    SAMPLING,
    EngineOptions,
    Knobs,
    Support,
)


@option("minivllm.engines.transformers.engine.TransformersEngine")
@dataclass(frozen=True)
class TransformersOptions(EngineOptions):
    """engine=transformers."""

    support = Support(
        "engine=transformers",
        {
            "model": MODEL,
            "quant": PRECISION,
            "decoding": SAMPLING,
            "runtime": RUNTIME,
            "vision": Knobs(("processor", "processor_cache_mb")),
        },
        package="transformers",
        own_torch=True,
    )
    mode: Literal["generate", "static_cache"] = "generate"
    """generate: a cache that grows; static_cache: one of a fixed size."""
    compile: bool = False
    """true: torch.compile of the decoding step, with mode=static_cache."""
    batch_size: int = knob(32, at_least=1)
    """Requests that one call of generate takes; the batch runs until its longest answer is done."""
    attn_implementation: Literal[
        "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"
    ] = "sdpa"
    """Transformers' name of the attention."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compile and self.mode != "static_cache":
            raise self.bad(
                "compile", "needs engine.mode=static_cache: transformers compiles no growing cache"
            )


@option("minivllm.engines.transformers.continuous.TransformersContinuousEngine")
@dataclass(frozen=True)
class TransformersContinuousOptions(EngineOptions):
    """engine=transformers_continuous."""

    support = Support(
        "engine=transformers_continuous",
        {
            "model": MODEL,
            "quant": PRECISION,
            "batching": Knobs(("max_num_seqs", "max_num_batched_tokens")),
            "cache": Knobs(("block_size", "num_blocks", "memory_fraction", "prefix_caching")),
            "decoding": SAMPLING,
            "runtime": RUNTIME,
        },
        package="transformers",
        own_torch=True,
    )
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "sdpa"
    """Transformers' name of the attention."""
    compile_level: int = knob(0, at_least=0, at_most=3)
    """0: not compiled; 1 to 3: as transformers' default_compile_level."""
