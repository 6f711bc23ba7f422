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
    """engine=openvino.

    Args:
        python: the interpreter that has OpenVINO GenAI.
        ir: folder of the converted model; "{type}" in it stands for bf16, int8 or int4, by `quant`.
        kv_cache_gb: memory for keys and values, 1e9 bytes; None grows with the requests.
        properties: further properties of OpenVINO's device, which win over what is made of the
            other groups.
        env: further environment variables of its process.
    """

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
    ir: str | None = None
    kv_cache_gb: int | None = knob(None, at_least=1)
    properties: dict[str, Any] | None = None
    env: dict[str, Any] | None = None
