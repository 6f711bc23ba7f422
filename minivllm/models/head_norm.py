"""The norm of queries and keys that some families have."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from minivllm.models.layers import weight


class HeadNorm(nn.Module):
    """RMSNorm of every query and key head at once, [tokens, heads + kv_heads, head_dim].

    `parts` holds for each tensor [head_dim] of the checkpoint how many heads share it; the loader
    repeats the tensor.
    """

    def __init__(self, head_dim: int, parts: dict[str, int], eps: float) -> None:
        super().__init__()
        self.parts, self.shape, self.eps = parts, (head_dim,), eps
        self.weight = weight(sum(parts.values()), head_dim)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, heads, head_dim] to the same."""
        return F.rms_norm(x, self.shape, None, self.eps) * self.weight
