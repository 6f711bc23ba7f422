"""Fixtures of the report's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from minivllm.report.figures.render import finish, finish_opening
from tests.pictures import painted_if_own, unpainted
from tests.report.synthetic import make_sweep, write


@pytest.fixture(autouse=True)
def _painted_if_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the pictures that every page has, but for tests with `painted_anew`; a fixture of a
    whole file has them."""
    monkeypatch.setattr("minivllm.report.page.finish", painted_if_own)
    for page in ("page", "studies.standalone.page"):
        monkeypatch.setattr(f"minivllm.report.{page}.finish_opening", unpainted)


@pytest.fixture
def painted_anew(_painted_if_own: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paint every figure of every page, where a test looks at pictures or at the page's size."""
    monkeypatch.setattr("minivllm.report.page.finish", finish)
    monkeypatch.setattr("minivllm.report.page.finish_opening", finish_opening)


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Folder of a sweep of six cells and three blocks, one cell failed."""
    return write(tmp_path / "runs", make_sweep())


@pytest.fixture
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the figures, which take most of the time, where a test reads words and numbers
    only."""
    monkeypatch.setattr("minivllm.report.page.figures", lambda inputs: [])
