"""The sizes of the part of a model that one of several ranks has, and how many can share it. Free
of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minivllm.errors import BadInput
from minivllm.models.config import ModelConfig
from minivllm.models.registry import sees
from minivllm.quant.options import Int4Options, NF4Options, QuantizerOptions

KNOB = "parallel.tensor"
BY_INPUTS = ("o_proj", "down_proj")  # last names of the layers that are split by their inputs
_MOST_TRIED = 64  # numbers of ranks that an error looks for


def part_config(whole: Mapping[str, Any], size: int) -> dict[str, Any]:
    """config.json of a model of a part's size.

    Args:
        whole: config.json of the whole model, which `size` ranks can share.
        size: the number of ranks.
    """
    model = ModelConfig.from_dict(whole)
    part = {
        **whole,
        "num_attention_heads": model.num_heads // size,
        "num_key_value_heads": max(1, model.num_kv_heads // size),
        "head_dim": model.head_dim,
        "intermediate_size": model.intermediate_size // size,
        "vocab_size": -(-model.vocab_size // size),  # rows beyond the last token are zeros
    }
    if model.num_experts:
        part["moe_intermediate_size"] = model.moe_intermediate_size // size
    return part


def require_shares(whole: Mapping[str, Any], size: int, quant: object, is_gguf: bool) -> None:
    """Check that ranks can share a model, each with whole heads, channels and groups of inputs.

    Args:
        whole: config.json of the whole model.
        size: the number of ranks.
        quant: the knobs of `quant`; what a class of the user's own stores is not known.
        is_gguf: whether the weights are those of a GGUF file.

    Raises:
        BadInput: they cannot; names what can be done.
    """
    model = ModelConfig.from_dict(whole)
    if is_gguf and isinstance(quant, QuantizerOptions):
        raise BadInput(
            f"{KNOB}={size}: a GGUF file's layers are computed as they are stored, and not split; "
            "use quant=bf16, fp16 or fp32"
        )
    if model.quantization is not None:
        raise BadInput(
            f"{KNOB}={size}: this checkpoint is quantised already, and its layers are not split; "
            "use the 16-bit checkpoint and quant"
        )
    if sees(model.architecture):
        raise BadInput(f"{KNOB}={size}: models that take images are not split; use {KNOB}=1")
    if not _divides(model, size):
        expert = f", {model.moe_intermediate_size} of an expert" if model.num_experts else ""
        fitting = [str(n) for n in range(2, _MOST_TRIED + 1) if _divides(model, n)]
        raise BadInput(
            f"{KNOB}={size}: ranks cannot share {model.num_heads} attention heads, "
            f"{model.num_kv_heads} key-value heads and {model.intermediate_size} channels of an "
            f"MLP{expert} evenly; "
            + (f"possible are {', '.join(fitting)}" if fitting else f"use {KNOB}=1")
        )
    _require_whole_groups(model, size, quant)


def _divides(model: ModelConfig, size: int) -> bool:
    kv = model.num_kv_heads
    numbers = (model.num_heads, model.intermediate_size, model.moe_intermediate_size)
    return not any(number % size for number in numbers) and (kv % size == 0 or size % kv == 0)


def _require_whole_groups(model: ModelConfig, size: int, quant: object) -> None:
    """Check that no group of inputs with one scale is cut."""
    if not isinstance(quant, Int4Options | NF4Options):
        return
    knob = "quant.group_size" if isinstance(quant, Int4Options) else "quant.block_size"
    group: int = quant.group_size if isinstance(quant, Int4Options) else quant.block_size
    inputs = {"o_proj": model.num_heads * model.head_dim}
    inputs["down_proj"] = model.moe_intermediate_size if model.num_experts else 0
    inputs["down_proj"] = inputs["down_proj"] or model.intermediate_size
    for layer, width in inputs.items():
        if width // size % group and not any(layer in part for part in quant.skip):
            raise BadInput(
                f"{KNOB}={size}: a rank has {width // size} of the {width} inputs of {layer}, "
                f"which cuts a group of {knob}={group}: choose a smaller {knob}, fewer ranks, or "
                f"quant.skip=[{layer}]"
            )
