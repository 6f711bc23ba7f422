"""The architecture of a pruned model, as its config.json says it. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from minivllm.errors import BadInput
from minivllm.models.config import SLIDING, ModelConfig
from minivllm.passes.pruning.options import LayerPruningOptions, WandaOptions, WidthPruningOptions

CHANNELS = 32  # MLP channels stay in multiples of it


def pruned_config(options: object, config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a pruned model as far as its sizes go: which layers are left out may still
    be open.

    Args:
        options: the knobs of `pruning`; of a class of the user's own nothing is known.
        config: the whole model's config.json.

    Raises:
        BadInput: the method does not fit the model.
    """
    dense = ModelConfig.from_dict(config)
    if isinstance(options, LayerPruningOptions):
        last = range(max(0, dense.num_layers - options.count), dense.num_layers)
        removed = last if options.layers is None else options.layers
        return without_layers(config, kept_layers(dense.num_layers, removed))
    if isinstance(options, WidthPruningOptions):
        return narrowed(config, *kept_widths(dense, options))
    if isinstance(options, WandaOptions) and dense.num_experts:
        raise BadInput("pruning=wanda: this model has experts; use pruning=magnitude")
    return dict(config)


def without_layers(config: Mapping[str, Any], kept: Sequence[int]) -> dict[str, Any]:
    """A config.json with some layers only, each of the kind that it had.

    Args:
        config: as the checkpoint has it.
        kept: the layers that stay, in order.
    """
    dense = ModelConfig.from_dict(config)
    pruned = {**config, "num_hidden_layers": len(kept)}
    given = {**(config.get("text_config") or {}), **config}
    if SLIDING in dense.layer_types or "layer_types" in given:
        # The rule of a family goes by a layer's place, which changes behind a gap.
        pruned["layer_types"] = [dense.layer_types[layer] for layer in kept]
    if dense.dense_layers:
        pruned["mlp_only_layers"] = [
            at for at, layer in enumerate(kept) if layer in dense.dense_layers
        ]
        pruned["decoder_sparse_step"] = 1
    return pruned


def kept_layers(layers: int, removed: Sequence[int]) -> list[int]:
    """The layers that stay. Raises BadInput if one is not there, or none stays."""
    if unknown := [layer for layer in removed if layer >= layers]:
        raise BadInput(f"pruning.layers={unknown[0]}: the model has layers 0 to {layers - 1}")
    if len(removed) >= layers:
        raise BadInput(f"pruning=layers: {len(removed)} of {layers} layers leave none")
    return [layer for layer in range(layers) if layer not in removed]


def kept_widths(dense: ModelConfig, options: WidthPruningOptions) -> tuple[int, int]:
    """MLP channels, a multiple of 32, and key-value heads that stay in each layer.

    Raises:
        BadInput: the method does not fit the model, or leaves nothing out.
    """
    if dense.num_experts:
        raise BadInput("pruning=width: this model has experts; use pruning=layers or a mask")
    channels = round(dense.intermediate_size * (1 - options.mlp) / CHANNELS) * CHANNELS
    channels = min(dense.intermediate_size, max(CHANNELS, channels))
    heads = dense.num_kv_heads - int(dense.num_kv_heads * options.heads)
    if (channels, heads) == (dense.intermediate_size, dense.num_kv_heads):
        raise BadInput(
            f"pruning=width: mlp={options.mlp} and heads={options.heads} leave nothing out of "
            f"{dense.intermediate_size} channels and {dense.num_kv_heads} key-value heads"
        )
    return channels, heads


def narrowed(config: Mapping[str, Any], channels: int, kv_heads: int) -> dict[str, Any]:
    """A config.json whose layers have so many MLP channels and key-value heads, with the query
    heads that read these."""
    dense = ModelConfig.from_dict(config)
    group = dense.num_heads // dense.num_kv_heads
    return {
        **config,
        "intermediate_size": channels,
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * group,
        "head_dim": dense.head_dim,
    }
