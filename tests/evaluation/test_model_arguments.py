"""Model arguments of lm-eval's command line become options and overrides."""

from __future__ import annotations

import pytest

from minivllm.config.groups import SECTIONS
from minivllm.errors import BadInput
from minivllm.evaluation.model_arguments import engine_overrides


def test_none_names_an_option() -> None:
    groups, overrides = engine_overrides(
        {"cache": None, "quant.skip": ["a", "b"], "quant.double_quant": True}
    )
    assert groups == {"cache": "none"}
    assert overrides == ['quant.skip=["a", "b"]', "quant.double_quant=true"]


@pytest.mark.parametrize("section", SECTIONS)
def test_settings_of_the_harness_are_rejected_as_such(section: str) -> None:
    with pytest.raises(BadInput, match=f"{section} has no effect here"):
        engine_overrides({f"{section}.setting": 1})
