"""What each method chooses, and what comes of it with quantisation and with drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.errors import BadInput
from minivllm.passes.pruning.methods import LayerPruning, NoPruning, WidthPruning
from minivllm.passes.pruning.options import (
    CalibrationOptions,
    LayerPruningOptions,
)
from minivllm.passes.pruning.statistics import Statistics
from tests.passes.pruning.test_shapes import LLAMA

FIXED = ["runtime.device=cpu", "runtime.threads=1"]


def made(_: CalibrationOptions) -> Statistics:
    """Statistics in which layer 2 does least, layers 0 and 1 together less, and channels and heads
    grow with their number."""
    cosines = torch.full((5, 5), 0.5, dtype=torch.float64)
    cosines[2, 3] = 0.99
    angles = torch.full((5, 5), 0.5, dtype=torch.float64)
    angles[0, 2] = 0.01
    norms = {}
    for layer in range(4):
        norms[f"model.layers.{layer}.mlp.down_proj"] = torch.arange(160.0)
        norms[f"model.layers.{layer}.self_attn.o_proj"] = torch.arange(64.0)
    return Statistics(1, cosines, angles, norms)


def never(_: CalibrationOptions) -> Statistics:
    """Nothing need be measured."""
    raise AssertionError("measured")


@pytest.mark.parametrize(
    ("method", "kept"),
    [
        (LayerPruning(), [0, 1, 3]),
        (LayerPruning(num_layers=2, importance="angular_distance"), [2, 3]),
    ],
)
def test_layers_are_chosen_by_importance(method: LayerPruning, kept: list[int]) -> None:
    plan = method.plan(LLAMA, made)
    assert plan is not None and plan.layers == kept and len(plan.notes) == 1


def test_named_layers_need_no_text() -> None:
    plan = LayerPruning(layers=(3, 1)).plan(LLAMA, never)
    assert plan is not None and plan.layers == [0, 2] and plan.counts == {"layers": 2}
    assert NoPruning().plan(LLAMA, never) is None
    with pytest.raises(BadInput, match=r"pruning.layers=\[1, 1\] must be different layers"):
        LayerPruningOptions(layers=(1, 1))


@pytest.mark.parametrize(
    ("option", "knobs", "words"),
    [
        (LayerPruningOptions, {"layers": (0, 1), "num_layers": 3}, "num_layers=3 chooses layers"),
        (LayerPruningOptions, {"layers": (0,), "importance": "angular_distance"}, "importance="),
    ],
    ids=["number", "importance"],
)
def test_a_knob_that_another_one_overrides_is_refused(
    option: Callable[..., object], knobs: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadInput, match=f"pruning.{words}"):
        option(**knobs)


def test_the_largest_channels_and_heads_stay() -> None:
    plan = WidthPruning(mlp=0.2, heads=0.5).plan(LLAMA, made)
    assert plan is not None and plan.widths is not None
    width = plan.widths[0]
    assert width.channels.tolist() == list(range(32, 160))
    assert width.kv_rows.tolist() == list(range(16, 32))
    assert width.query_rows.tolist() == list(range(32, 64))


def answers(*overrides: str) -> tuple[list[int], Mapping[str, Any]]:
    """Greedy tokens of the embedded model, and the reports of its passes by name."""
    with LLM("tiny", overrides=[*FIXED, *overrides]) as llm:
        (result,) = llm.generate(["def main("], SamplingParams(max_tokens=16, temperature=0))
        return result.outputs[0].token_ids, {one.name: one for one in llm.engine.loaded.passes}


def test_a_pruned_model_is_quantised_and_drafts_for_the_whole_one() -> None:
    layer = ["pruning=layers", "pruning.layers=[7]"]
    _, reports = answers(*layer, "quant=int4")
    assert reports["native"].count == 7
    whole, _ = answers("quant=fp32")
    draft = ["speculative=draft", "pruning@speculative.pruning=layers"]
    named = ["speculative.pruning.layers=[7]", "quant@speculative.quant=fp32"]
    drafted, _ = answers("quant=fp32", *draft, *named, "speculative.adaptive=false")
    assert drafted == whole
