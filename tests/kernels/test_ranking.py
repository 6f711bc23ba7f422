"""The order of equal scores."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.kernels.ranking import _last_equal, largest


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 4),
    st.integers(1, 70),
    st.sampled_from([(0.0,), (-0.0, 0.0), (-math.inf, -1.5, 2.0), (math.inf, -3.0, 1e-40, 0.0)]),
    st.integers(0, 99),
)
def test_equal_scores_are_ordered_by_token_id_whatever_the_count(
    rows: int, vocab: int, values: tuple[float, ...], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    places = torch.randint(len(values), (rows, vocab), generator=generator)
    scores = torch.tensor(values)[places]
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    for count in {1, max(1, vocab // 3), max(1, vocab - 1), vocab}:
        found, ids = largest(scores, count)
        assert torch.equal(found, ordered[:, :count]) and torch.equal(ids, order[:, :count])
        last = found == found[:, -1:]  # as devices find them
        assert torch.equal(_last_equal(scores, found)[last], order[:, :count][last])
