"""The methods of pruning: what each leaves out of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from minivllm.models.config import ModelConfig
from minivllm.passes.pruning.options import (
    CalibrationOptions,
    LayerPruningOptions,
    MagnitudeOptions,
    NoPruningOptions,
    WandaOptions,
    WidthPruningOptions,
)
from minivllm.passes.pruning.plan import PruningPlan, Width, by_magnitude, by_wanda
from minivllm.passes.pruning.shapes import (
    kept_layers,
    kept_widths,
    narrowed,
    pruned_config,
    without_layers,
)
from minivllm.passes.pruning.statistics import Statistics

Measure = Callable[[CalibrationOptions], Statistics]


class PruningMethod(Protocol):
    """A `pruning` option."""

    def plan(self, config: Mapping[str, Any], measure: Measure) -> PruningPlan | None:
        """What is left out; None: nothing.

        Args:
            config: the whole model's config.json.
            measure: loads the whole model and computes the calibration text.
        """


def _all_layers(config: Mapping[str, Any]) -> list[int]:
    return list(range(ModelConfig.from_dict(config).num_layers))


class NoPruning(NoPruningOptions):
    """The model as it is."""

    def plan(self, config: Mapping[str, Any], measure: Measure) -> PruningPlan | None:
        return None


class LayerPruning(LayerPruningOptions):
    """Whole layers are left out."""

    def plan(self, config: Mapping[str, Any], measure: Measure) -> PruningPlan | None:
        layers, how = _all_layers(config), "as requested"
        if self.layers is not None:
            removed = sorted(self.layers)
        elif self.importance == "angular_distance":
            removed, how = measure(self).quietest_run(self.count), "smallest angular distance"
        else:
            influence = measure(self).block_influence()
            removed = sorted(sorted(layers, key=lambda layer: influence[layer])[: self.count])
            how = "least block influence"
        kept = kept_layers(len(layers), removed)
        note = f"pruning: layers {', '.join(map(str, removed))} left out ({how})"
        counts = {"layers": len(removed)}
        return PruningPlan(without_layers(config, kept), kept, notes=(note,), counts=counts)


class WidthPruning(WidthPruningOptions):
    """Every layer becomes narrower."""

    def plan(self, config: Mapping[str, Any], measure: Measure) -> PruningPlan | None:
        dense = ModelConfig.from_dict(config)
        channels, heads = kept_widths(dense, self)
        pruned = narrowed(config, channels, heads)
        statistics, layers = measure(self), _all_layers(config)
        widths = [_width(dense, statistics, layer, channels, heads) for layer in layers]
        note = (
            f"pruning: {channels} of {dense.intermediate_size} MLP channels and {heads} of "
            f"{dense.num_kv_heads} key-value heads stay in each layer"
        )
        counts = {
            "mlp_channels": dense.intermediate_size - channels,
            "kv_heads": dense.num_kv_heads - heads,
        }
        return PruningPlan(pruned, layers, widths, notes=(note,), counts=counts)


def _width(
    dense: ModelConfig, statistics: Statistics, layer: int, channels: int, heads: int
) -> Width:
    """What stays of a layer: the channels and heads whose activations have the largest norms."""
    prefix = f"model.layers.{layer}"
    inner = statistics.norms[f"{prefix}.mlp.down_proj"]
    group, dim = dense.num_heads // dense.num_kv_heads, dense.head_dim
    attended = statistics.norms[f"{prefix}.self_attn.o_proj"]
    by_kv_head = attended.square().view(dense.num_kv_heads, group * dim).sum(1)
    kept = _largest(by_kv_head, heads)
    return Width(_largest(inner, channels), _rows(kept, group * dim), _rows(kept, dim))


def _largest(scores: Tensor, count: int) -> Tensor:
    """Indices of the largest scores, in order."""
    return scores.topk(count).indices.sort().values


def _rows(heads: Tensor, size: int) -> Tensor:
    """Rows of heads of `size` rows each."""
    return (heads[:, None] * size + torch.arange(size)).flatten()


class Magnitude(MagnitudeOptions):
    """Small weights become 0."""

    def plan(self, config: Mapping[str, Any], measure: Measure) -> PruningPlan | None:
        mask = by_magnitude(self.sparsity)
        note = "pruning: the smallest weights are 0; dense kernels read them all the same"
        layers = _all_layers(config)
        return PruningPlan(dict(config), layers, None, mask, (note,))


class Wanda(WandaOptions):
    """Weights become 0 that contribute little, by weight and input."""

    def plan(self, config: Mapping[str, Any], measure: Measure) -> PruningPlan | None:
        pruned_config(self, config)  # raises where the method does not fit
        mask = by_wanda(measure(self).norms, self.sparsity)
        note = "pruning: weights that contribute least are 0; dense kernels read them all the same"
        layers = _all_layers(config)
        return PruningPlan(dict(config), layers, None, mask, (note,))
