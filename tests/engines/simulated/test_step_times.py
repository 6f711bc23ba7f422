"""Costs of a rank and the time of collectives, against hand computations."""

from __future__ import annotations

import pytest

from minivllm.config.compose import compose
from minivllm.engines.simulated.step_times import Communication, RooflineTimes, rank_costs
from minivllm.models.config import ModelConfig
from minivllm.models.costs import architecture_costs


def test_collectives_move_what_a_ring_moves() -> None:
    two = Communication(2, 10, 2048, 4000, 1e9, 5e-6)
    # 21 all-reduces of 2 * 1/2 of 3 * 2,048 bytes, half of a row of logits, 22 latencies
    seconds = (21 * 3 * 2048 + 2000) / 1e9 + 22 * 5e-6
    assert two.ms(3, 1) == pytest.approx(1e3 * seconds)
    eight = Communication(8, 10, 2048, 0, 1e9, 0.0)
    assert eight.ms(3, 0) / (Communication(2, 10, 2048, 0, 1e9, 0.0).ms(3, 0)) == pytest.approx(
        (2 * 7 / 8) / (2 * 1 / 2)
    )


def test_a_rank_has_its_share_and_at_least_one_head_of_keys() -> None:
    model = ModelConfig.from_dict(compose(["model=qwen3"])["model"]["architecture"])
    whole, _ = architecture_costs(model, {"dtype": "bfloat16"})
    share = rank_costs(whole, 16, model.num_kv_heads)
    assert share["kv_bytes_per_token"] == whole["kv_bytes_per_token"] / 8
    for name in ("streamed_weight_bytes", "flops_per_token", "head_flops_per_row"):
        assert share[name] == whole[name] / 16
    alone = RooflineTimes(whole, 1e12, 1e14, 0.0)
    ranks = RooflineTimes(share, 1e12, 1e14, 0.0, Communication(16, 28, 2048, 600, 1e11, 1e-6))
    extra = Communication(16, 28, 2048, 600, 1e11, 1e-6).ms(4, 4)
    assert ranks(4, 4, 0, 0, 0, 0) == pytest.approx(alone(4, 4, 0, 0, 0, 0) / 16 + extra)
    assert "16 ranks" in ranks.describe()
