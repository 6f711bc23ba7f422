"""What errors are made of."""

from __future__ import annotations

from pathlib import Path

import pytest

from minivllm import errors


def test_the_command_that_installs_an_extra_is_that_of_the_clone_or_of_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert errors.install("serve") == "pip install -e '.[serve]' -c constraints.txt"
    monkeypatch.setattr(errors, "ROOT", tmp_path)  # site-packages
    assert errors.install("serve") == "pip install 'minivllm[serve]'"
