"""Pages of records with events, beside a report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minivllm.analysis.rows import read_rows
from minivllm.bench.records.events import write_events
from minivllm.bench.records.record import Record
from minivllm.bench.records.storage import EVENTS
from minivllm.report.view import recording
from minivllm.report.view.recording import recordings, title_of
from tests.report.pagereader import Page, build_report
from tests.report.synthetic import make_record, write
from tests.tasks.test_view import BUNDLES

ENDED = {
    "step": 1,
    "time_s": 1.2,
    "end_s": 1.5,
    "states": [[1.5, 0, "done", "length"]],
    "scheduled": [[0, 4, 2, "prefill"]],
    "num_waiting": 0,
    "num_used_blocks": 0,
}


def written(root: Path, records: list[Record]) -> Path:
    """A sweep of records, each with events."""
    folder = write(root, records, parquet=False)
    for directory in folder.iterdir():
        write_events(directory, [json.dumps(one).encode() for one in (*BUNDLES, ENDED)])
    return folder


def test_a_report_links_the_page_of_a_run_with_events(tmp_path: Path) -> None:
    records = [make_record(sweep="old", run_id="0", arm="default"), make_record("int8", run_id="1")]
    folder = written(tmp_path / "runs", records[:1])
    write(tmp_path / "runs", records[1:], parquet=False)
    page = Page(index := build_report(tmp_path / "runs", tmp_path / "report"))
    file = f"view-{next(folder.iterdir()).name}.html"
    assert [link for link in page.attributes("a", "href") if "view-" in link] == [file]
    assert (index.parent / file).read_text().startswith("<!doctype html>")
    assert "What happened in each step?" in page.text
    assert "(first) took 450 ms, of which about 400 ms is its own. For 11 % of that" in page.text


def test_a_report_without_events_says_nothing_of_them(tmp_path: Path) -> None:
    write(tmp_path / "runs", [make_record()], parquet=False)
    page = Page(build_report(tmp_path / "runs", tmp_path / "report"))
    assert "in each step" not in page.text


def test_damaged_events_are_left_out_and_pages_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [make_record(sweep="old", run_id=f"{i}", block=i) for i in range(4)]
    folder = written(tmp_path / "runs", records)
    (next(folder.glob("*-0")) / EVENTS).write_bytes(b"no")
    rows, _ = read_rows(folder)
    assert len(recordings(rows, tmp_path)) == 3
    monkeypatch.setattr(recording, "MOST_PAGES", 2)
    assert len(recordings(rows, tmp_path)) == 2


def test_a_title_names_what_tells_runs_apart() -> None:
    row = {"sweep": "mine", "arm": "default", "block": 0}
    assert title_of(row) == "mine"
    assert title_of({**row, "arm": "quant=int8", "block": 2}) == "mine: quant=int8, block 2"
