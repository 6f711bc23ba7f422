"""Masks, and tensors without what is left out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minivllm.errors import BadInput
from minivllm.passes.pruning.plan import (
    PrunedWeights,
    PruningPlan,
    Width,
    by_magnitude,
    by_wanda,
    smallest,
)


class Held:
    """Weights that a test holds."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors, self.warnings = tensors, ["said"]
        self.stored_bytes: dict[str, int] = {}

    def check(self, shapes: dict[str, tuple[int, ...] | None], *_: object) -> None:
        """The shapes must be those of the tensors."""
        assert shapes == {name: tuple(one.shape) for name, one in self.tensors.items()}

    def fill(self, name: str, out: Tensor) -> None:
        out.copy_(self.tensors[name])


@settings(max_examples=50)
@given(st.integers(1, 6), st.integers(1, 30), st.floats(0.05, 0.95), st.integers(0, 99))
def test_the_smallest_of_each_row(rows: int, inputs: int, sparsity: float, seed: int) -> None:
    scores = torch.rand(rows, inputs, generator=torch.Generator().manual_seed(seed))
    mask = smallest(scores, sparsity)
    assert (mask.sum(1) == round(inputs * sparsity)).all()
    for row, gone in zip(scores, mask, strict=True):
        assert not gone.any() or gone.all() or row[gone].max() <= row[~gone].min()


def test_magnitude_goes_by_the_whole_matrix_and_wanda_by_each_output() -> None:
    weight = torch.tensor([[1.0, -2.0, 3.0, 4.0], [10.0, -20.0, 30.0, 40.0]])
    assert by_magnitude(0.5)("any", weight).tolist() == [[True] * 4, [False] * 4]
    norms = {"model.layers.0.self_attn.qkv_proj": torch.tensor([100.0, 1.0, 1.0, 1.0])}
    mask = by_wanda(norms, 0.5)("model.layers.0.self_attn.k_proj.weight", weight)
    assert mask.tolist() == [[False, True, True, False]] * 2


def test_layers_are_renumbered_and_cut() -> None:
    tensors = {
        f"model.layers.{layer}.{name}": torch.arange(24.0).view(6, 4) + 100 * layer
        for layer in range(3)
        for name in ("mlp.gate_proj.weight", "self_attn.q_proj.weight")
    }
    tensors |= {
        f"model.layers.{layer}.mlp.down_proj.weight": torch.arange(24.0).view(4, 6) + 100 * layer
        for layer in range(3)
    }
    tensors["model.norm.weight"] = torch.ones(4)
    width = Width(torch.tensor([1, 5]), torch.tensor([0, 3]), torch.tensor([0]))
    plan = PruningPlan({}, [0, 2], [width, width])
    held = Held(tensors)
    pruned = PrunedWeights(held, plan, {name: tuple(t.shape) for name, t in tensors.items()})
    pruned.check({}, False)
    assert pruned.warnings == ["said"]
    out = torch.empty(2, 4)
    pruned.fill("model.layers.1.mlp.gate_proj.weight", out)
    assert out.tolist() == tensors["model.layers.2.mlp.gate_proj.weight"][[1, 5]].tolist()
    pruned.fill("model.layers.1.self_attn.q_proj.weight", out)
    assert out.tolist() == tensors["model.layers.2.self_attn.q_proj.weight"][[0, 3]].tolist()
    out = torch.empty(4, 2)
    pruned.fill("model.layers.0.mlp.down_proj.weight", out)
    assert out.tolist() == tensors["model.layers.0.mlp.down_proj.weight"][:, [1, 5]].tolist()
    norm = torch.empty(4)
    pruned.fill("model.norm.weight", norm)
    assert norm.tolist() == [1.0] * 4


def test_zeros_are_counted_and_norms_left_alone() -> None:
    tensors = {
        "model.layers.0.mlp.up_proj.weight": torch.arange(1.0, 9).view(2, 4),
        "model.layers.0.mlp.gate.weight": torch.ones(2, 4),
        "model.layers.0.input_layernorm.weight": torch.ones(4),
    }
    plan = PruningPlan({}, [0], mask=by_magnitude(0.5))
    pruned = PrunedWeights(Held(tensors), plan, {n: tuple(t.shape) for n, t in tensors.items()})
    for name, whole in tensors.items():
        out = torch.empty_like(whole)
        pruned.fill(name, out)
        assert (out == 0).sum() == (4 if "up_proj" in name else 0)
    assert plan.report(1.5).counters == {"zeroed": 4} and plan.report(1.5).seconds == 1.5


def test_fused_projections_are_not_narrowed() -> None:
    width = Width(torch.tensor([0]), torch.tensor([0]), torch.tensor([0]))
    with pytest.raises(BadInput, match="stores its projections as one tensor"):
        PrunedWeights(
            Held({}),
            PruningPlan({}, [0], [width]),
            {"model.layers.0.self_attn.qkv_proj.weight": (6, 4)},
        )
