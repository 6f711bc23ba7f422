"""What each peer honours, as it is known before any of them is started. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from minivllm.bench.targets.supported_knobs import Honoured, Knobs

_MODEL = Knobs(
    ("path", "weights", "max_model_len", "seed", "architecture"), says="model.* but model.rope_scaling"
)
_PRECISION = Knobs(("dtype",), says="quant=bf16, fp16 or fp32")
_SAMPLING = Knobs(("max_tokens", "temperature", "top_k", "top_p", "seed", "ignore_eos"))
_RUNTIME = Knobs(("device", "threads"))

TRANSFORMERS = Honoured(
    "engine=transformers",
    {"model": _MODEL, "quant": _PRECISION, "decoding": _SAMPLING, "runtime": _RUNTIME},
)
TRANSFORMERS_CONTINUOUS = Honoured(
    "engine=transformers_continuous",
    {
        "model": _MODEL,
        "quant": _PRECISION,
        "batching": Knobs(("max_num_seqs", "max_num_batched_tokens")),
        "cache": Knobs(("block_size", "num_blocks", "memory_fraction", "prefix_caching")),
        "decoding": _SAMPLING,
        "runtime": _RUNTIME,
    },
)
VLLM = Honoured(
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
)
_SERVED = {
    "model": replace(_MODEL, says="model.* but rope_scaling (its tokenizer, vocabulary and context)"),
    "decoding": Knobs(
        (
            *("max_tokens", "temperature", "top_p", "seed", "ignore_eos"),
            *("presence_penalty", "frequency_penalty"),
        )
    ),
}
OPENAI = Honoured("engine=openai", {**_SERVED, "runtime": Knobs(("device",))})
# A server that is started here is given OMP_NUM_THREADS, as every worker is.
OPENAI_WITH_COMMAND = Honoured("engine=openai", {**_SERVED, "runtime": _RUNTIME})

TABLES = {
    "minivllm.bench.targets.transformers.TransformersEngine": TRANSFORMERS,
    "minivllm.bench.targets.transformers_continuous.TransformersContinuousEngine": TRANSFORMERS_CONTINUOUS,
    "minivllm.bench.targets.vllm.VllmEngine": VLLM,
}


def refuse(config: Mapping[str, Any]) -> None:
    """Check a resolved configuration before its engine is started, if that is a peer.

    Raises:
        BadInput: see `Honoured.check`.
    """
    engine = config["engine"]
    if engine.get("_target_") == "minivllm.bench.targets.openai.OpenAIEngine":
        table: Honoured | None = OPENAI if engine.get("command") is None else OPENAI_WITH_COMMAND
    else:
        table = TABLES.get(str(engine.get("_target_")))
    if table is not None:
        table.check(config)
