"""A configuration as typed options."""

from __future__ import annotations

import pytest

from minivllm.bench.options import MeasureOptions
from minivllm.config.compose import compose
from minivllm.config.typed import Config
from minivllm.errors import BadInput
from minivllm.models.options import ModelOptions


def test_groups_sections_and_settings_are_attributes() -> None:
    config = Config(compose(["model=tiny", "sweep.dry_run=true", "runs_dir=here", "runs=[a]"]))
    assert isinstance(config.model, ModelOptions) and config.model.path == "embedded"
    assert isinstance(config.measure, MeasureOptions) and config.measure is config.measure
    assert config.sweep.dry_run and config.quality.text is None
    assert (config.name, config.runs_dir, config.runs) == (None, "here", ["a"])


def test_what_is_missing_has_its_default_and_a_group_has_none() -> None:
    config = Config({})
    assert config.runtime.device == "auto" and config.measure.price.currency == "USD"
    assert (config.runs_dir, config.reports_dir, config.runs) == ("runs", "reports", [])
    with pytest.raises(AttributeError, match="the configuration has no model"):
        _ = config.model


def test_knobs_of_a_users_own_class_are_attributes() -> None:
    config = Config({"model": {"_target_": "mine.Model", "layers": 3}})
    assert config.target("model") == "mine.Model" and vars(config.model) == {"layers": 3}


def test_a_setting_of_another_type_names_its_key() -> None:
    with pytest.raises(BadInput, match=r"^runs_dir=null must be text$"):
        _ = Config({"runs_dir": None}).runs_dir
    with pytest.raises(BadInput, match=r"^measure.slo.ttft_ms=-1.0 must be above 0$"):
        _ = Config({"measure": {"slo": {"ttft_ms": -1}}}).measure
