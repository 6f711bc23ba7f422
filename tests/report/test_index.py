"""The list of all reports: what each one found, newest first, and nothing of others' pages."""

from __future__ import annotations

from pathlib import Path

from minivllm.report.index import rebuild
from tests.report.pagereader import Page, build_report
from tests.report.synthetic import make_record, write


def report(tmp_path: Path, name: str, day: int) -> None:
    record = make_record(sweep=name, run_id=name)
    record.provenance["started_at"] = f"2025-03-0{day}T10:00:00+0000"
    build_report(
        write(tmp_path / "runs" / name, [record], parquet=False), tmp_path / "reports" / name
    )


def test_every_report_is_listed_with_its_verdict(tmp_path: Path, without_figures: None) -> None:
    evil = "<img src=x onerror=alert(1)> & 'co'"
    for name, day in (("first", 1), (evil, 3), ("second", 2)):
        report(tmp_path, name, day)
    (tmp_path / "reports" / "other").mkdir()
    (tmp_path / "reports" / "other" / "index.html").write_text("<title>an older page</title>")
    listed = rebuild(tmp_path / "reports")
    assert listed == tmp_path / "reports" / "index.html"
    page = Page(listed)
    order = [page.text.index(name) for name in (evil, "second", "first")]
    assert order == sorted(order) and "<img" not in page.source and "other" in page.text
    assert page.text.count("output tokens/s") == 3 and "2025-03-03 10:00" in page.text
    links = page.attributes("a", "href")
    assert (
        "first/index.html" in links and len(links) == 4 and all("<" not in link for link in links)
    )
    assert rebuild(tmp_path / "reports") == listed  # its own page is replaced


def test_a_page_of_somebody_else_is_left_alone(tmp_path: Path, without_figures: None) -> None:
    report(tmp_path, "first", 1)
    mine = tmp_path / "reports" / "index.html"
    mine.write_text("<title>mine</title>")
    assert rebuild(tmp_path / "reports") is None and mine.read_text() == "<title>mine</title>"
    assert rebuild(tmp_path / "runs") is None  # there is no report
