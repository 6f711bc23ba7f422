"""How passes are applied, and what is kept of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minivllm.errors import BadInput
from minivllm.kernels.context import BuildContext
from minivllm.models.load.loading import LoadedModel, load_model
from minivllm.models.options import ModelOptions
from minivllm.passes.base import PassContext, PassReport, apply_passes
from minivllm.quant.plain import Plain

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
