"""What tests of sweeps and their statistics share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_collecting(monkeypatch: pytest.MonkeyPatch) -> None:
    """statsmodels collects garbage in every correction, which takes the longer the more modules are
    loaded."""
    monkeypatch.setattr("gc.collect", lambda generation=2: 0)
