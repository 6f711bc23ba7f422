"""What is left out of a checkpoint, and a source of weights that leaves it out.

Pruning happens while weights are read, before they are quantised: each tensor comes in its pruned
shape or with its zeros, so that every quantisation, kernel and count sees a model of that size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from minivllm.errors import BadInput
from minivllm.models.load.loading import LoadedModel, PassReport
from minivllm.models.load.weights import WeightSource
from minivllm.passes.pruning.options import PASS
from minivllm.quant.base import QuantMethod, Shapes

_LAYER = re.compile(r"^(model\.layers\.)(\d+)(\..*)$")
# Last names of the matrices of a layer that masks apply to: not routers, norms and embeddings.
MATRICES = frozenset(
    (
        *("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"),
        *("gate_proj", "up_proj", "down_proj", "gate_up_proj"),
        *("w1", "w2", "w3"),
    )
)
# The linear layer of the model that a tensor is a part of, where that has another name.
_FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
# Of the name of a tensor, [out, in], as it is in the checkpoint: True where the weight becomes 0.
Mask = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True)
class Width:
    """What stays of one layer: indices of MLP channels, and of rows of queries and of keys or
    values, int64 and sorted."""

    channels: Tensor
    query_rows: Tensor
    kv_rows: Tensor

    def cut(self, leaf: str, full: Tensor) -> Tensor:
        """A tensor of the layer without what is left out.

        Args:
            leaf: last names of the tensor, such as "q_proj.weight".
            full: as the checkpoint has it.
        """
        projection = leaf.partition(".")[0]
        rows = {
            "gate_proj": self.channels,
            "up_proj": self.channels,
            "q_proj": self.query_rows,
            "k_proj": self.kv_rows,
            "v_proj": self.kv_rows,
        }.get(projection)
        columns = {"down_proj": self.channels, "o_proj": self.query_rows}.get(projection)
        if rows is not None:
            return full[rows.to(full.device)]
        if columns is not None and full.ndim == 2:
            return full[:, columns.to(full.device)]
        return full


@dataclass
class PruningPlan:
    """What one model loses.

    Attributes:
        config: the pruned model's config.json.
        layers: original numbers of the layers that stay, in order.
        widths: of these layers, if they are narrowed.
        mask: which weights become 0, if any do.
        notes: what was chosen, for the log and the record.
        counts: how much was left out, for liveness; `zeroed` grows while weights are read.
    """

    config: dict[str, Any]
    layers: list[int]
    widths: list[Width] | None = None
    mask: Mask | None = None
    notes: tuple[str, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)

    def weights(self, source: WeightSource, whole: Shapes) -> WeightSource:
        return PrunedWeights(source, self, whole)

    def report(self, seconds: float) -> PassReport:
        """What was left out, once the weights are read."""
        return PassReport(PASS, len(self.layers), seconds=seconds, counters=self.counts)

    def finish(self, loaded: LoadedModel, seconds: float) -> None:
        """Report what was left out of a model, once its weights are read.

        Args:
            loaded: the pruned model.
            seconds: that pruning and loading took.
        """
        loaded.passes.append(self.report(seconds))
        loaded.warnings += self.notes


def _leaf(name: str) -> str:
    """The last two names of a tensor, such as "q_proj.weight"."""
    return ".".join(name.split(".")[-2:])


class PrunedWeights:
    """Weights without what a plan leaves out, by the pruned model's names.

    Args:
        source: of the whole model.
        plan: what is left out.
        whole: the shapes of the whole model's tensors.

    Raises:
        BadInput: layers are to be narrowed whose projections are stored as one tensor.
    """

    def __init__(self, source: WeightSource, plan: PruningPlan, whole: Shapes) -> None:
        self._source, self._plan, self._whole = source, plan, whole
        self.warnings = source.warnings  # the same list: `check` adds to it
        self.stored_bytes = source.stored_bytes
        fused = {f"{name}.weight" for name in _FUSED.values()}
        if plan.widths is not None and any(_leaf(name) in fused for name in whole):
            raise BadInput(
                "pruning=width: this family stores its projections as one tensor; use "
                "pruning=layers or a mask"
            )

    def check(self, shapes: Shapes, tied_head: bool, as_stored: Collection[str] = ()) -> None:
        """The source has exactly the tensors of the whole model."""
        self._source.check(self._whole, tied_head, as_stored)

    def method(self, layer: str, quant: QuantMethod) -> QuantMethod:
        return self._source.method(layer, quant)

    def fill(self, name: str, out: Tensor) -> None:
        plan, original, layer, leaf = self._plan, name, None, ""
        if (match := _LAYER.match(name)) is not None:
            layer = int(match[2])
            original = f"{match[1]}{plan.layers[layer]}{match[3]}"
            leaf = _leaf(name)
        shape = self._whole.get(original) or out.shape
        if tuple(shape) == tuple(out.shape):
            self._source.fill(original, out)
        else:
            assert plan.widths is not None and layer is not None
            full = torch.empty(shape, dtype=out.dtype, device=out.device)
            self._source.fill(original, full)
            out.copy_(plan.widths[layer].cut(leaf, full))
        is_matrix = leaf.partition(".")[0] in MATRICES and out.ndim == 2
        if plan.mask is not None and is_matrix:
            out.masked_fill_(plan.mask(original, out), 0)
            plan.counts["zeroed"] = plan.counts.get("zeroed", 0) + int((out == 0).sum())


def smallest(scores: Tensor, sparsity: float) -> Tensor:
    """Where the smallest scores of each row are.

    Args:
        scores: [rows, inputs]; not below 0.
        sparsity: share of a row.

    Returns:
        bool [rows, inputs].
    """
    mask = torch.zeros_like(scores, dtype=torch.bool)
    count = round(scores.shape[1] * sparsity)
    if count:
        mask.scatter_(1, scores.topk(count, dim=1, largest=False).indices, True)
    return mask


def by_magnitude(sparsity: float) -> Mask:
    """The smallest weights of a whole matrix."""

    def mask(_: str, weight: Tensor) -> Tensor:
        scores = weight.abs().float()
        return smallest(scores.view(1, -1), sparsity).view(weight.shape)

    return mask


def by_wanda(norms: Mapping[str, Tensor], sparsity: float) -> Mask:
    """The smallest products of weight and norm of the input, of each output.

    Args:
        norms: of the inputs of each linear layer, float32 [in]; see Statistics.
        sparsity: share of an output's weights.
    """

    def mask(name: str, weight: Tensor) -> Tensor:
        beside, leaf = name.removesuffix(".weight").rsplit(".", 1)
        norm = norms[f"{beside}.{_FUSED.get(leaf, leaf)}"]
        scores = weight.abs().float() * norm.to(weight.device)
        return smallest(scores, sparsity)

    return mask
