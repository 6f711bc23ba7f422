"""parallel.tensor: every rank holds a part of every large matrix (Megatron-LM, Shoeybi et al. 2019,
arXiv:1909.08053).

A matrix can be split by its outputs or by its inputs:

    by outputs   y_r = W_r x           each rank computes some of the outputs
    by inputs    y = sum of W_r x_r    each rank multiplies the inputs that it has; the sum over all
                                       ranks is the result

One after the other they need a single sum. A rank has some of the attention heads: it computes
their queries, keys and values (by outputs), attends to its own cache, and multiplies the result by
its columns of o_proj (by inputs). It has some of the MLP's channels: gate_proj and up_proj by
outputs, down_proj by inputs, and so has each expert of a mixture, whose sum over experts comes
first. So a layer has two sums over ranks. Norms, routers and the hidden state between layers are
whole on every rank.

Embedding and head are split by the vocabulary: a token's row comes from the rank that has it, as a
sum with zeros; logits are gathered on rank 0, which alone chooses tokens.

Weights are cut while they are read, before they are quantised, as pruning does it: no rank holds
more than its part and one whole tensor, and every count of bytes and operations is that of a rank.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from minivllm.models.config import ModelConfig
from minivllm.models.load.filling import tensor_shapes
from minivllm.models.load.loading import LoadedModel
from minivllm.models.load.weights import LoadTransform, WeightSource
from minivllm.models.moe import MoE
from minivllm.parallel.ranks import Ranks
from minivllm.passes.base import PassContext, PassReport, Wrapper
from minivllm.passes.shard_sizes import BY_INPUTS, part_config
from minivllm.quant.base import QuantMethod, RowScaled, Shapes


@dataclass(frozen=True)
class Shard:
    """The part of a model that one rank holds; see LoadTransform.

    Attributes:
        whole: config.json of the whole model.
        ranks: this rank among all.
        before: changes the checkpoint's model to the whole one, while it is loaded.
    """

    whole: Mapping[str, Any]
    ranks: Ranks
    before: LoadTransform | None = None

    @cached_property
    def model(self) -> ModelConfig:
        """The sizes of the whole model."""
        return ModelConfig.from_dict(self.whole)

    @property
    def config(self) -> dict[str, Any]:
        """config.json of a model of the part's size."""
        return part_config(self.whole, self.ranks.size)

    def weights(self, source: WeightSource, whole: Shapes) -> WeightSource:
        if self.before is not None:
            source = self.before.weights(source, whole)
            whole = tensor_shapes(self.model, torch.float32)
        return ShardedWeights(source, self, whole)

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """The rank's part of a tensor.

        Args:
            name: of the tensor, by the model's names.
            whole: as the checkpoint has it.
        """
        *_, leaf, kind = name.split(".")
        match leaf:
            case "q_proj" | "gate_proj" | "up_proj":
                return self._even(whole)
            case "k_proj" | "v_proj":
                return self._kv_heads(whole)
            case "qkv_proj":  # all three in one tensor
                model = self.model
                kv = model.num_kv_heads * model.head_dim
                q, k, v = whole.split((model.num_heads * model.head_dim, kv, kv))
                return torch.cat([self._even(q), self._kv_heads(k), self._kv_heads(v)])
            case "gate_up_proj":
                return torch.cat([self._even(half) for half in whole.chunk(2)])
            case "o_proj" | "down_proj" if kind == "bias":  # is added once
                return whole if self.ranks.rank == 0 else torch.zeros_like(whole)
            case "o_proj" | "down_proj":
                return self._even(whole, 1)
            case "embed_tokens" | "lm_head":
                rows = -(-len(whole) // self.ranks.size)
                return whole[self.ranks.rank * rows : (self.ranks.rank + 1) * rows]
        return whole

    def _even(self, whole: Tensor, dim: int = 0) -> Tensor:
        """One of the equal parts of a tensor."""
        count = whole.shape[dim] // self.ranks.size
        return whole.narrow(dim, self.ranks.rank * count, count)

    def _kv_heads(self, whole: Tensor) -> Tensor:
        """The rows of the key or value heads that the rank's query heads read. With fewer heads
        than ranks, several ranks have the same one."""
        heads, dim = self.model.num_kv_heads, self.model.head_dim
        first = self.ranks.rank * heads // self.ranks.size
        return whole.narrow(0, first * dim, max(1, heads // self.ranks.size) * dim)


class ShardedWeights:
    """The weights of one rank's part; see WeightSource.

    Args:
        source: of the whole model.
        shard: the part.
        whole: the shapes of the whole model's tensors.
    """

    def __init__(self, source: WeightSource, shard: Shard, whole: Shapes) -> None:
        self._source, self._shard, self._whole = source, shard, whole
        self.warnings = source.warnings  # the same list: `check` adds to it
        self.stored_bytes = source.stored_bytes

    def check(self, shapes: Shapes, tied_head: bool, as_stored: Collection[str] = ()) -> None:
        """The source has exactly the tensors of the whole model."""
        self._source.check(self._whole, tied_head, as_stored)

    def method(self, layer: str, quant: QuantMethod) -> QuantMethod:
        """A row of a layer that is split by inputs lies on all ranks, and is
        scaled by the largest weight of all of it."""
        if not isinstance(quant, RowScaled) or not layer.endswith(BY_INPUTS):
            return quant
        shared, ranks = copy.copy(quant), self._shard.ranks
        shared.over_ranks = lambda largest: ranks.all_reduce(largest, largest=True)
        return shared

    def fill(self, name: str, out: Tensor) -> None:
        whole = torch.empty(self._whole[name] or out.shape, dtype=out.dtype, device=out.device)
        self._source.fill(name, whole)
        part = self._shard.cut(name, whole)
        out[: len(part)] = part
        out[len(part) :] = 0  # of the last rank, where the vocabulary is no multiple


class SummedOverRanks(Wrapper):
    """A layer split by its inputs: the sum of what all ranks compute.

    Args:
        inner: gives this rank's term.
        ranks: this rank among all.
    """

    def __init__(self, inner: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.inner, self.ranks = inner, ranks

    def forward(self, x: Tensor) -> Tensor:
        """[rows, inputs of this rank] to [rows, outputs]."""
        return self.ranks.all_reduce(self.inner(x))


class SplitEmbedding(Wrapper):
    """An embedding of which each rank has the rows of some tokens.

    Args:
        inner: has this rank's rows.
        rows: how many each rank has.
        ranks: this rank among all.
    """

    def __init__(self, inner: nn.Module, rows: int, ranks: Ranks) -> None:
        super().__init__()
        self.inner, self.rows, self.ranks = inner, rows, ranks

    def forward(self, token_ids: Tensor) -> Tensor:
        """Token ids [tokens] of the whole vocabulary to [tokens, hidden]."""
        own = token_ids - self.ranks.rank * self.rows
        is_here = (own >= 0) & (own < self.rows)
        out = self.inner(own.where(is_here, 0))
        return self.ranks.all_reduce(out.where(is_here[:, None], 0))


class GatheredHead(Wrapper):
    """A head of which each rank has the outputs of some tokens.

    Args:
        inner: gives this rank's logits.
        vocab_size: tokens of the whole vocabulary.
        ranks: this rank among all.
    """

    def __init__(self, inner: nn.Module, vocab_size: int, ranks: Ranks) -> None:
        super().__init__()
        self.inner, self.vocab_size, self.ranks = inner, vocab_size, ranks

    def forward(self, x: Tensor) -> Tensor:
        """[rows, hidden] to logits [rows, vocab] on rank 0, to its own ones on every other rank."""
        return self.ranks.gather(self.inner(x))[:, : self.vocab_size]


class ShardLayers:
    """Combines what the ranks compute. Their weights were cut when they were loaded."""

    name = "shard"

    def apply(self, loaded: LoadedModel, context: PassContext) -> PassReport:
        model, ranks = loaded.model, context.build.ranks
        wrapped = 0
        for name, module in list(model.named_modules()):
            in_expert = ".experts." in name
            if isinstance(module, MoE) or (name.endswith(BY_INPUTS) and not in_expert):
                model.set_submodule(name, SummedOverRanks(module, ranks))
                wrapped += 1
        embedding, rows = model.model.embed_tokens, model.config.vocab_size
        model.set_submodule("model.embed_tokens", SplitEmbedding(embedding, rows, ranks))
        model.lm_head = GatheredHead(model.lm_head, loaded.config.vocab_size, ranks)
        return PassReport(self.name, wrapped + 2)
