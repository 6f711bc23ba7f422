"""The list of public reports names tests that exist, and links where it says."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "reference" / "public-reports.md").read_text(encoding="utf-8")
ITEMS = [" ".join(item.split()) for item in re.findall(r"^\* (.*(?:\n  .*)*)", PAGE, re.M)]


def test_every_report_has_a_description_a_test_and_links() -> None:
    assert len(ITEMS) >= 30
    for item in ITEMS:
        found = re.fullmatch(r"(.*\S) `(tests/\S+\.py)` \((\[.*\))\)", item)
        assert found and len(found[1]) > 20, item
        assert (ROOT / found[2]).is_file(), found[2]
        reports = re.findall(r"\[([\w. -]*)#(\d+)\]\((\S+?)\)", found[3])
        assert reports, item
        for name, number, url in reports:
            assert url.endswith(f"/{number}"), url
            assert name.strip().split(" ")[-1].lower() in url.lower(), url
