"""The knobs of engines in an interpreter of their own, and which knobs of other groups each
supports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from minivllm.platform.options import knob, option
from minivllm.platform.support import INT4, INT8, EngineOptions, Knobs, Support

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
            "model": Knobs(("path", "weights", "max_model_len", "seed", "architecture")),
            "quant": Knobs(
                ("dtype", "activations"), (INT8, INT4), "quant=bf16, fp16, fp32, int8 or int4"
            ),
            "batching": Knobs(("max_num_seqs", "max_num_batched_tokens", "chunked_prefill")),
            "cache": Knobs(("prefix_caching", "kv_dtype")),
            "decoding": Knobs(
                ("max_tokens", "temperature", "top_k", "top_p", "seed", "ignore_eos")
            ),
            "runtime": Knobs(("device", "threads")),
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
