"""Model arguments of lm-eval's command line become options and overrides."""

from __future__ import annotations

from minivllm.evaluation.model_arguments import engine_overrides


def test_none_names_an_option() -> None:
    groups, overrides = engine_overrides(
        {"cache": None, "quant.skip": ["a", "b"], "quant.double_quant": True}
    )
    assert groups == {"cache": "none"}
    assert overrides == ['quant.skip=["a", "b"]', "quant.double_quant=true"]
