"""A process that is started here finds the modules that this one finds."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from minivllm.platform.processes.children import module_path


def test_each_place_is_named_once_and_the_present_folder_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "/a", str(tmp_path), "/a"])
    assert module_path().split(os.pathsep) == [str(tmp_path), "/a"]
