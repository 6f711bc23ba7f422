"""The memory of the cache."""

from __future__ import annotations

import pytest
import torch

from minivllm.cache.kv import zeros


@pytest.mark.parametrize("size", [1, 100, 5_000_000])
def test_zeros_begin_at_a_cache_line(size: int) -> None:
    """Whatever numpy allocates them from: small memory of its own, or pages of the system."""
    for _ in range(8):  # small ones lie at other places each time
        rows = zeros((2, size), torch.bfloat16, torch.device("cpu"))
        assert rows.data_ptr() % 64 == 0
        assert rows.shape == (2, size) and rows.dtype is torch.bfloat16
        assert rows.is_contiguous() and not rows.any()
