"""A sparse mixture of experts in place of the MLP (Shazeer et al. 2017; Mixtral, Jiang et al.
2024)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minivllm.models.config import ModelConfig
from minivllm.models.families.llama import LlamaForCausalLM
from minivllm.models.layers import MLP, Linear


class MoE(nn.Module):
    """Each token is computed by the experts with the highest router scores, and gets their weighted
    sum.

    The (token, expert) pairs are sorted by expert: each expert that got tokens multiplies all of
    them at once, and no other expert is read. The sum is formed token by token, in float32 and in
    the order of the scores, so that it does not depend on the other tokens of the batch.

    Args:
        config: sizes, number of experts, experts a token.
        normalize: scale the chosen experts' weights to a sum of one.
    """

    in_graphs = "waits"  # for the number of tokens of each expert

    def __init__(self, config: ModelConfig, normalize: bool) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self.num_experts, self.top_k = config.num_experts, config.num_experts_per_token
        self.normalize = normalize
        # The router is never quantised: another choice of experts is a greater error than any
        # rounding, and the router has less than a thousandth of the weights.
        self.gate = Linear(hidden, {"gate": self.num_experts}, exact=True)
        self.experts = nn.ModuleList(
            MLP(hidden, inner, config.activation) for _ in range(self.num_experts)
        )
        # Experts of the last call; a tensor where reading the number would wait for the device.
        self.experts_run: int | Tensor = 0

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] to the same."""
        scores = self.gate(x).softmax(-1, dtype=torch.float32)
        weights, chosen = scores.topk(self.top_k, -1)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        sorted_experts, order = chosen.flatten().sort(stable=True)
        edges = torch.arange(1, self.num_experts + 1, device=x.device)
        ends = torch.searchsorted(sorted_experts, edges, out_int32=True)
        by_token = x.new_empty(len(order), x.shape[1])
        by_token[order] = self.run_experts(x[order // self.top_k], ends)
        first, *others = by_token.view(len(x), self.top_k, -1).unbind(1)
        total = first * weights[:, :1]
        for i, other in enumerate(others, start=1):
            total.addcmul_(other, weights[:, i : i + 1])
        return total.to(x.dtype)

    def run_experts(self, x: Tensor, ends: Tensor) -> Tensor:
        """Compute each expert on its rows: the first expert those before ends[0], the second those
        before ends[1], ...

        Args:
            x: [rows, hidden]; ends: int32 [num_experts].

        Returns:
            [rows, hidden].
        """
        stops = ends.tolist()  # the layer's one wait for the device
        counts = [stop - start for start, stop in zip([0, *stops], stops, strict=False)]
        used = [expert for expert, count in enumerate(counts) if count]
        groups = x.split([counts[expert] for expert in used])
        outputs = [self.experts[expert](group) for expert, group in zip(used, groups, strict=True)]
        self.experts_run = len(used)
        return torch.cat(outputs)


class MoEForCausalLM(LlamaForCausalLM):
    """What the families with experts share."""

    @property
    def experts_run(self) -> int | Tensor:
        counts = [moe.experts_run for moe in self.mixtures]
        waiting = [count for count in counts if isinstance(count, Tensor)]
        known = sum(count for count in counts if not isinstance(count, Tensor))
        return torch.stack(waiting).sum() + known if waiting else known

    @property
    def expert_bytes(self) -> int:
        parts = (
            t for moe in self.mixtures for t in (*moe.experts.parameters(), *moe.experts.buffers())
        )
        return sum(t.numel() * t.element_size() for t in parts)

    @property
    def mixtures(self) -> list[MoE]:
        """The mixtures of all layers that have one."""
        parts = (part for layer in self.model.layers for part in layer.children())
        inner = (getattr(part, "inner", part) for part in parts)  # of the wrapper of a pass
        return [part for part in inner if isinstance(part, MoE)]
