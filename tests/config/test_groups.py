"""The option dataclasses of all groups, and a configuration as typed options."""

from __future__ import annotations

import subprocess
import sys

import pytest

from minivllm.bench.options import MeasureOptions
from minivllm.config.compose import compose
from minivllm.config.groups import OPTIONS, PACKAGE, TARGETLESS, Config
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


def test_a_name_is_found_in_the_one_file_that_gives_it() -> None:
    for known in (OPTIONS, TARGETLESS):
        assert all(name in known[name].names for name in known)  # type: ignore[attr-defined]
    names = [*OPTIONS, *TARGETLESS]
    assert len({*names}) == len(names) > 60
    assert "measure" not in OPTIONS and "minivllm.cache.paged.PagedCache" not in TARGETLESS
    for other in ("my_package.Mine", "minivllm.cache.paged.Mine", "minivllm.nothing", "", None):
        assert OPTIONS.get(other) is None  # type: ignore[call-overload]


def test_only_the_file_of_a_class_is_imported() -> None:
    script = (
        "import sys\n"
        "from minivllm.config.groups import OPTIONS, TARGETLESS\n"
        "OPTIONS['minivllm.cache.paged.PagedCache'], TARGETLESS['vision']\n"
        "print(*(name for name in sys.modules if name.endswith('.options')))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    rooms = {"cache", "config", "extras.vision", "platform"}
    assert {*done.stdout.split()} == {f"{PACKAGE.name}.{room}.options" for room in rooms}, (
        done.stderr
    )
