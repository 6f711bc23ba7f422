"""The page as a whole: self-contained, with figures, links that resolve, and rebuilt the same."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest

from minivllm.bench.record import STATUSES
from minivllm.report import build_report
from tests.report.pagereader import Page, build, table
from tests.report.synthetic import failed, make_record, make_sweep


def test_page_is_well_formed_and_needs_no_network(sweep: Path, tmp_path: Path) -> None:
    page = Page(build_report(sweep, tmp_path / "out"))
    sources = (
        page.attributes("img", "src") + page.attributes("script", "src") + page.attributes("link", "href")
    )
    assert len(page.attributes("img", "src")) == 7
    assert all(source.startswith("data:") for source in sources)
    assert not re.search(r"url\(|@import|https?:", page.source)
    assert all(len(alt) > 30 for alt in page.attributes("img", "alt"))
    assert "viewport" in page.attributes("meta", "name")
    assert "prefers-color-scheme: dark" in page.source


def test_links_resolve_and_name_the_records(sweep: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "er" / "report"
    page = Page(build_report(sweep, out))
    links = page.attributes("a", "href")
    assert all(not urlparse(link).scheme for link in links)
    targets = {(out / unquote(link)).resolve() for link in links}
    assert all(target.is_file() for target in targets)
    assert {t for t in targets if t.name == "record.json"} == set(sweep.glob("*/record.json"))
    assert {"table.csv", "table.md", "throughput.png"} <= {target.name for target in targets}


@pytest.mark.parametrize("status", [status for status in STATUSES if status != "ok"])
def test_nothing_but_one_failure_still_gives_a_report(tmp_path: Path, status: str) -> None:
    record = failed(
        make_record(), status, "SomeError", "it <b>went</b> wrong & badly", "first line\nlast <line>"
    )
    page, out = build(tmp_path, [record])
    assert "failed: there is nothing to compare" in page.text
    assert "it <b>went</b> wrong & badly" in page.text  # escaped in the source
    assert "last <line>" in page.text and "<b>" not in page.source
    assert next(iter(table(out).values()))["status"] == status
    assert status in (out / "table.md").read_text()
    assert (out / "throughput.png").is_file()


def test_without_parquet_files_only_the_timelines_are_missing(tmp_path: Path) -> None:
    page, out = build(tmp_path, make_sweep(), parquet=False)
    assert not (out / "steps.png").exists() and not (out / "telemetry.png").exists()
    assert len(page.attributes("img", "src")) == 5


def test_a_torn_parquet_file_does_not_cost_the_report(sweep: Path, tmp_path: Path) -> None:
    for path in sweep.glob("*/*.parquet"):
        path.write_bytes(b"PAR1 torn")
    page = Page(build_report(sweep, tmp_path / "out"))
    assert len(page.attributes("img", "src")) == 5


def test_timelines_are_capped_and_say_so(tmp_path: Path) -> None:
    records = [make_record(cell_id=f"c{i}", arm=f"arm {i}", run_id=f"r{i}", index=i) for i in range(14)]
    page, _ = build(tmp_path, records)
    assert "Shown: 12 of 14 finished cells" in page.text


def test_rebuilding_changes_nothing_and_leaves_nothing_behind(sweep: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    build_report(sweep, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    (out / "latency.png").write_bytes(b"old")
    build_report(sweep, out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    for parquet in sweep.glob("*/*.parquet"):
        parquet.unlink()
    build_report(sweep, out)
    assert {path.name for path in out.iterdir()} == set(before) - {"steps.png", "telemetry.png"}
