"""scripts/proposer_cost.py measures each proposer on each text."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.scripts.load import load_script


def test_it_measures_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load_script("proposer_cost")
    monkeypatch.setattr(script, "CONTEXTS", (16, 256))
    monkeypatch.setattr(script, "STORED", 10 * script.OUTPUT)
    target = tmp_path / "made.json"
    monkeypatch.setattr(
        sys, "argv", ["proposer_cost.py", "--tokens", "200", "--output", str(target)]
    )
    script.main()
    rows = json.loads(target.read_text())["rows"]
    assert len(rows) == 2 * 3 * 2 * 2
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)
    for row in rows:
        assert 0 < row["p50_us"] <= row["p99_us"] and row["finished_us"] > 0
        assert row["context_us_a_token"] > 0 and row["context_bytes_a_token"] > 0
        if row["text"] == "random tokens":
            assert row["tokens_a_proposal"] < 1.1
        elif row["text"] == "repeated sentence" and row["context"] == 256:
            assert row["tokens_a_proposal"] == 1 + row["most"] and row["acceptance"] == 1
