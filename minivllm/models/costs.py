"""What a token costs a model: bytes and operations, counted from its architecture. Free of
torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from minivllm.cache.spec import token_bytes
from minivllm.models.config import ModelConfig

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def model_costs(
    model: dict[str, Any],
    streamed_params: int,
    streamed_weight_bytes: int,
    dtype: str,
    device: str = "cpu",
    expert_bytes: int | None = None,
    kv_bytes_per_token: int | None = None,
    windows: Sequence[int | None] = (),
    trims: bool = False,
    matrix_dtype: str | None = None,
) -> dict[str, Any]:
    """The `EngineInfo.model` dictionary of a decoder-only transformer with grouped-query attention.

    Args:
        model: the fields of ModelConfig.
        streamed_params: all parameters but the input embedding.
        streamed_weight_bytes: the bytes they take as stored.
        dtype: compute dtype.
        device: where it runs.
        expert_bytes: the bytes that all experts take as stored; None where they are not quantised.
        kv_bytes_per_token: bytes of one token's keys and values; None if they are stored in
            `dtype`.
        windows: of the layers (`ModelConfig.windows`).
        trims: the last layer computes only rows with logits after its attention.
        matrix_dtype: dtype of layers that multiply in 8 bits; None where no layer does.
    """
    layers, width = model["num_layers"], model["head_dim"]
    windowed = [window for window in windows if window is not None]  # all the same
    if kv_bytes_per_token is None:
        kv_bytes_per_token = 2 * layers * model["num_kv_heads"] * width * BYTES[dtype]
    head = model["vocab_size"] * model["hidden_size"]
    mixtures = layers - len(model["dense_layers"]) if model["num_experts"] else 0
    experts, active = mixtures * model["num_experts"], mixtures * model["num_experts_per_token"]
    expert_params = 3 * model["hidden_size"] * model["moe_intermediate_size"]
    if expert_bytes is None:
        expert_bytes = experts * expert_params * BYTES[dtype]
    tail = 0
    if trims:
        mixes = bool(model["num_experts"]) and layers - 1 not in model["dense_layers"]
        dense = 3 * model["hidden_size"] * model["intermediate_size"]
        tail = model["num_experts_per_token"] * expert_params if mixes else dense
        tail += model["num_heads"] * width * model["hidden_size"]
    return {
        "streamed_weight_bytes": int(streamed_weight_bytes - expert_bytes),
        "expert_weight_bytes": expert_bytes / experts if experts else 0.0,
        "experts_per_token": active,
        "flops_per_token": 2.0
        * (streamed_params - head - (experts - active) * expert_params - tail),
        "head_flops_per_row": 2.0 * (head + tail),
        "kv_bytes_per_token": kv_bytes_per_token,
        # q·k and p·v are each a multiply and an add for every head and dimension.
        "attention_flops_per_token_pair": 4.0 * layers * model["num_heads"] * width,
        "window": min(windowed, default=None),
        "windowed_share": len(windowed) / layers,
        "dtype": dtype,
        "matrix_dtype": matrix_dtype or dtype,
        "device": device,
    }


# Bytes of a weight of the quantised linear layers, scales included; other methods store the compute
# dtype.
STORED_BYTES = {"Int8": 1.0, "Int8Mixed": 1.0, "FP8": 1.0, "NF4": 0.53, "Int4": 0.53}


def architecture_costs(
    config: ModelConfig, quant: dict[str, Any], kv_dtype: str = "auto", trims: bool = False
) -> tuple[dict[str, Any], int]:
    """The costs of a model without its weights, counted from its architecture.

    Linear layers take what the method stores, with `lm_head` the head, too; otherwise embedding
    and head take its dtype. Keys and values take the bytes of `kv_dtype`.

    Returns:
        As `EngineInfo.model`, with the number of `experts` over all layers; and the bytes of all
        weights.
    """
    width, heads = config.hidden_size, config.num_heads * config.head_dim
    kv, table = config.num_kv_heads * config.head_dim, config.vocab_size * config.hidden_size
    sparse = config.num_layers - len(config.dense_layers) if config.num_experts else 0
    plain = config.num_layers * 2 * width * (heads + kv)
    plain += (config.num_layers - sparse) * 3 * width * config.intermediate_size
    experts = sparse * config.num_experts
    in_experts = experts * 3 * width * config.moe_intermediate_size
    dtype = str(quant.get("dtype", "bfloat16"))
    stored = STORED_BYTES.get(str(quant.get("_target_", "")).rpartition(".")[2], BYTES[dtype])
    own_head = bool(quant.get("lm_head"))
    streamed = int((plain + in_experts + own_head * table) * stored)
    streamed += 0 if own_head else table * BYTES[dtype]
    idle = 0 if config.tie_word_embeddings and not own_head else table * BYTES[dtype]
    params = plain + in_experts + table
    costs = model_costs(
        vars(config),
        params,
        streamed,
        dtype,
        expert_bytes=int(in_experts * stored),
        kv_bytes_per_token=config.num_layers
        * token_bytes(config.num_kv_heads, config.head_dim, BYTES[dtype], kv_dtype),
        windows=config.windows,
        trims=trims,
    )
    return {**costs, "experts": experts}, streamed + idle


def trims(runtime: Mapping[str, Any]) -> bool:
    """Whether these knobs of `runtime` trim the last layer: compiled layers keep all rows."""
    return bool(runtime.get("trim_last_layer")) and not runtime.get("compile")
