"""What errors are made of."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from minivllm import errors


def test_the_command_that_installs_an_extra_is_that_of_the_clone_or_of_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert errors.install("serve") == "pip install -e '.[serve]' -c constraints.txt"
    monkeypatch.setattr(errors, "ROOT", tmp_path)  # site-packages
    assert errors.install("serve") == "pip install 'minivllm[serve]'"


def test_a_package_of_the_command_line_that_is_missing_is_one_line() -> None:
    missing = errors.NotInstalled.of(ModuleNotFoundError("no", name="scipy.stats"))
    assert str(missing) == "scipy is not installed: pip install -e '.[run]' -c constraints.txt"
    assert errors.NotInstalled.of(ModuleNotFoundError("no", name="my_package")) is None
    project = tomllib.loads((errors.ROOT / "pyproject.toml").read_text())["project"]
    extra = [text.partition(">")[0] for text in project["optional-dependencies"]["run"]]
    assert extra == [*errors.OF_RUN]
    assert not any(text.startswith(errors.OF_RUN) for text in project["dependencies"])


def test_the_nearest_name_is_asked_for_or_all_are_offered() -> None:
    names = ["nf4", "int8"]
    assert errors.meant("nf", names) == errors.nearest("nf", names) == "did you mean nf4?"
    assert errors.meant("nf", names, cutoff=0.9) == errors.meant("x", names) == ""
    assert errors.nearest("x", names) == "choose from nf4, int8"
    assert errors.nearest("x", []) == "it has none"
