"""The table of public reports names tests that exist, and links where it says."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "reference" / "public-reports.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| [")]


def test_every_report_has_an_outcome_and_a_test() -> None:
    assert len(ROWS) >= 30
    for row in ROWS:
        _, reports, story, outcome, test = (cell.strip() for cell in row.rstrip("|").split("|"))
        assert re.match("correct|fixed", outcome) and len(story) > 20, row
        assert (ROOT / test.strip("`")).is_file(), test
        for name, number, url in re.findall(r"\[([\w. -]*)#(\d+)\]\((\S+?)\)", reports):
            assert url.endswith(f"/{number}"), url
            assert name.strip().split(" ")[-1].lower() in url.lower(), url
