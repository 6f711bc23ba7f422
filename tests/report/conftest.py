"""Fixtures of the report's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report.synthetic import make_sweep, write


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Folder of a sweep of six cells and three blocks, one cell failed."""
    return write(tmp_path / "runs", make_sweep())


@pytest.fixture
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the figures, which take most of the time, where a test reads words and numbers
    only."""
    monkeypatch.setattr("minivllm.report.page.figures", lambda inputs: [])
