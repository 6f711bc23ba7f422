"""How passes are applied, what is kept of it, and the linear layers of a model."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm.assembly import build_engine
from minivllm.config.compose import compose
from minivllm.errors import BadInput
from minivllm.kernels.device import BuildContext
from minivllm.models.load.loading import LoadedModel, load_model
from minivllm.models.options import ModelOptions
from minivllm.passes.base import PassContext, PassReport, apply_passes, linear_layers
from minivllm.quant.base import kernel_name
from minivllm.quant.plain import Plain
from tests.reference import make_checkpoint

CPU = torch.device("cpu")
CONTEXT = PassContext(BuildContext(CPU), {})


class Fixed:
    """A pass that returns what it was made with."""

    name = "fixed"

    def __init__(self, report: Any) -> None:
        self.report = report

    def apply(self, loaded: LoadedModel, context: PassContext) -> Any:
        return self.report


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(ModelOptions("embedded"), quant=Plain(), context=BuildContext(CPU))


def test_a_model_keeps_the_reports_in_order_and_warns_of_their_notes(loaded: LoadedModel) -> None:
    before = list(loaded.warnings)
    timed = PassReport("timed", 3, -8, seconds=5.0, notes=("a note",), counters={"more": 2})
    apply_passes([Fixed(PassReport("first", 1)), Fixed(timed)], loaded, CONTEXT)
    first, second = loaded.passes
    assert (first.name, first.count, second) == ("first", 1, timed)
    assert 0 < first.seconds < 1, "measured where the pass says nothing"
    assert loaded.warnings == [*before, "a note"]


def test_a_pass_without_a_report_is_one_line(loaded: LoadedModel) -> None:
    with pytest.raises(
        BadInput, match=r"pass fixed: apply\(\) returned NoneType; return a PassReport"
    ):
        apply_passes([Fixed(None)], loaded, CONTEXT)


@pytest.mark.parametrize(
    ("family", "overrides", "counts"),
    [
        ("qwen3", [], {"PlainLinear": 13}),
        ("qwen3", ["runtime.determinism=batch"], {"PlainLinear": 13}),
        ("qwen3", ["quant=int8", "quant.skip=[down_proj]"], {"Int8Linear": 9, "PlainLinear": 4}),
        # Two projections and the gate in three layers, and the head; eight experts a layer have two
        # each, unless grouped.
        ("qwen3_moe", ["runtime.moe=grouped"], {"PlainLinear": 10}),
        ("qwen3_moe", ["runtime.moe=loop"], {"PlainLinear": 58}),
    ],
)
def test_each_is_counted_once(
    family: str,
    overrides: list[str],
    counts: dict[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("minivllm.quant.plain.can_pack", lambda dtype: False)
    make_checkpoint(tmp_path, family)
    model = ["model=hf", f"model.path={tmp_path}", "runtime.device=cpu", "runtime.cpu_kernels=off"]
    quant = [] if any("quant=" in one for one in overrides) else ["quant=fp32"]
    engine = build_engine(compose([*model, *quant, *overrides]))
    assert dict(Counter(map(kernel_name, linear_layers(engine.loaded)))) == counts
    engine.close()
