"""The knobs of engine=openvino, and what it supports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minivllm.platform.options import knob, option
from minivllm.platform.support import (
    INTEGERS,
    MODEL,
    RUNTIME,
    SAMPLING,
    EngineOptions,
    Knobs,
    Support,
)

INSTALL_OPENVINO = (
    "python3 -m venv ~/openvino && ~/openvino/bin/pip install openvino-genai optimum-intel nncf"
)


@option("minivllm.engines.openvino.engine.OpenVINOEngine")
@dataclass(frozen=True)
class OpenVINOOptions(EngineOptions):
    """engine=openvino."""

    support = Support(
        "engine=openvino",
        {
            "model": MODEL,
            "quant": INTEGERS,
            "batching": Knobs(("max_num_seqs", "max_num_batched_tokens", "chunked_prefill")),
            "cache": Knobs(("prefix_caching", "kv_dtype")),
            "decoding": SAMPLING,
            "runtime": RUNTIME,
        },
        peer="OpenVINO",
        peer_packages=("openvino-genai",),
        install=INSTALL_OPENVINO,
    )
    python: str | None = None
    """The interpreter that has OpenVINO GenAI, e.g. $HOME/openvino/bin/python."""
    ir: str | None = None
    """Folder of the converted model (scripts/save_openvino.py); {type} in it is bf16, int8 or int4
    by quant, e.g. models/qwen3-openvino-{type}."""
    kv_cache_gb: int | None = knob(None, at_least=1)
    """Memory for keys and values, 10^9 bytes; null: it grows with the requests."""
    properties: dict[str, Any] | None = None
    """Further properties of the device, e.g. {KV_CACHE_PRECISION: u4}; they win over the other
    groups."""
    env: dict[str, Any] | None = None
    """Further environment variables of its process."""
