"""Diagrams of the documentation as pictures."""

from __future__ import annotations

import json
import subprocess
from html import escape
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.load import load_script

script = load_script("diagrams")
SVG = '<svg id="d" width="100%" xmlns="x" style="max-width: 4px;" viewBox="-1 0 40.5 9"><a/></svg>'


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A browser that has drawn a diagram, and what it was asked to show."""
    shown: list[str] = []

    def run(command: list[str], **_: Any) -> Any:
        shown.append((tmp_path / "page.html").read_text())
        drawn = escape(json.dumps([SVG]), quote=False)
        dom = f'<body><pre id="drawn">{drawn}</pre></body>'
        return subprocess.CompletedProcess(command, 0, dom, "")

    monkeypatch.setattr(script, "FOLDER", tmp_path)
    (tmp_path / "mermaid.min.js").touch()
    monkeypatch.setattr(script.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(script.subprocess, "run", run)
    return shown


def test_a_diagram_has_its_own_width_and_a_background(launched: list[str]) -> None:
    (svg,) = script.draw(['flowchart LR\n a --> b["c"]'])
    assert 'width="40.5" xmlns="x" style="background: white; max-width: 4px;"' in svg
    assert json.dumps('flowchart LR\n a --> b["c"]') in launched[0]


def test_what_is_missing_is_said(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert script.missing() is None
    (script.FOLDER / "mermaid.min.js").unlink()
    monkeypatch.setattr(script.shutil, "which", lambda name: name == "chromium" or None)
    assert script.missing() == "npm"
    monkeypatch.setattr(script.shutil, "which", lambda name: None)
    assert script.missing() == "Chromium"
