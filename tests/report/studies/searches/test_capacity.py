"""What the report says of a search for capacity is what its records say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minivllm.analysis.capacity import FEWEST_BLOCKS, TASK
from minivllm.analysis.cells import gather
from minivllm.analysis.rows import read_rows
from minivllm.bench.records.record import Record
from minivllm.bench.records.storage import write_record
from minivllm.report.figures.render import finish
from minivllm.report.inputs import ReportInputs
from minivllm.report.studies.searches import capacity
from tests.report.pagereader import Page, build_report
from tests.report.synthetic import make_record

RUNS = FEWEST_BLOCKS


def measured(
    root: Path,
    rate: float,
    slow: int,
    name: str = "",
    slo: float = 200.0,
    seed: int = 0,
    **config: Any,
) -> Record:
    """A record of a rate at which so many of 100 requests took 300 ms, the others 100."""
    record = make_record(run_id=f"{name}rate{rate:g}-{seed}", cell_id=f"c{rate:g}")
    record.config |= {"arrival": {"rate": rate}, **config}
    record.config["measure"] = {"repeats": 1, "slo": {"ttft_ms": slo}, "seed": seed}
    record.config["task"] = {
        "_target_": TASK,
        "attainment": 0.9,
        "confidence": 0.95,
        "max_blocks": RUNS,
        "tolerance": 0.05,
        "max_rates": 4,
    }
    requests = [
        {"status": "ok", "output_tokens": 8, "ttft_ms": 300.0 if i % 100 < slow else 100.0}
        for i in range(100)
    ]
    write_record(root / "s" / f"{name}cell-{record.run_id}", record, requests=requests)
    return record


def searched(root: Path, rate: float, slow: int, name: str = "", **changes: Any) -> None:
    """As many records of a rate as it takes to know whether it holds, each with another seed."""
    for seed in range(RUNS):
        measured(root, rate, slow, name, seed=seed, **changes)


def again(root: Path, record: Record, name: str) -> None:
    """Write the record once more, as it has been changed."""
    (folder,) = (root / "s").glob(f"{name}*")
    write_record(folder, record)


def test_rates_with_their_shares_and_verdicts(tmp_path: Path) -> None:
    """At 1 request/s all of 100 meet their objective, at 2 one in two."""
    for rate, slow in ((1.0, 0), (2.0, 50)):
        searched(tmp_path, rate, slow)
    rows, _ = read_rows(tmp_path)
    found = capacity.find(rows)
    plot, shown = finish(capacity.figure(found)), capacity.section(found, [])
    (search,) = shown["searches"]
    assert [(row["rate"], row["share"], row["verdict"]) for row in search["rows"]] == [
        ("1", "100", "holds"),
        ("2", "50.0", "fails"),
    ]
    assert search["unit"] == "requests/s" and "rate of arrival, requests/s" in json.dumps(plot.live)
    assert (search["objectives"], search["name"], search["left_out"]) == ("TTFT ≤ 200 ms", "", 0)
    assert "1 requests/s is the highest rate tried that holds" in plot.alt
    assert [item["label"] for item in plot.legend] == [
        "wanted",
        "share",
        "interval",
        "holds",
        "fails",
    ]


def test_an_interval_that_ends_at_none_or_all_says_so(tmp_path: Path) -> None:
    """To the last digit: rounding would leave a trace in place of 0, which then has an exponent."""
    for rate, slow in ((1.0, 0), (2.0, 100)):
        searched(tmp_path, rate, slow)
    shown = capacity.section(capacity.find(read_rows(tmp_path)[0]), [])
    assert shown is not None
    every, none = (row["interval"] for row in shown["searches"][0]["rows"])
    assert every.endswith(" to 100") and none.startswith("0 to ")
    page = Page(build_report(tmp_path, tmp_path / "out"))
    assert "What rate of requests can qwen3 serve?" in page.text
    assert "Rate requests/s" in page.text


def test_the_page_begins_with_the_capacity_and_its_rates_ascend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fastest rate is no result: it may have failed."""
    monkeypatch.setattr("minivllm.report.page.figures", lambda inputs: [])
    for position, (rate, slow) in enumerate(((1.0, 0), (4.0, 50), (2.0, 0))):
        record = measured(tmp_path, rate, slow)
        record.position = position
        searched(tmp_path, rate, slow)
        again(tmp_path, record, f"cell-rate{rate:g}-0")
    page = Page(build_report(tmp_path, tmp_path / "out"))
    begins = "Capacity: 2 requests/s is the highest rate tried that holds"
    assert (
        page.text.index(begins) < page.text.index("What rate can it serve?")
        and "Fastest" not in page.text
    )
    cells = gather(read_rows(tmp_path)[0])
    assert [cell.first("config.arrival.rate") for cell in cells] == [1.0, 2.0, 4.0]


def test_a_search_in_which_nothing_failed_is_a_lower_bound_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minivllm.report.page.figures", lambda inputs: [])
    for rate in (1.0, 2.0):
        searched(tmp_path, rate, 0)
    page = Page(build_report(tmp_path, tmp_path / "out"))
    assert page.text.count("Capacity: at least 2 requests/s") == 1  # said by the verdict
    assert "no rate that was tried failed" in page.text and "highest rate tried" not in page.text


def test_cells_are_not_pooled(tmp_path: Path) -> None:
    """Two configurations searched into one folder: the same rate holds for one and fails for the
    other."""
    for name, slow in (("good", 0), ("bad", 50)):
        searched(tmp_path, 1.0, slow, name, batching={"name": name})
    found = capacity.find(read_rows(tmp_path)[0])
    shown, plot = capacity.section(found, []), capacity.figure(found)
    assert shown is not None and plot is not None
    told = {
        s["name"]: [(r["rate"], r["blocks"], r["verdict"]) for r in s["rows"]]
        for s in shown["searches"]
    }
    assert told == {"goodcell": [("1", RUNS, "holds")], "badcell": [("1", RUNS, "fails")]}
    assert (
        "goodcell: capacity: at least 1 requests/s" in plot.alt
        and "badcell: capacity: no rate tried from 1 requests/s up" in plot.alt
    )
    alike = capacity.section([replace(search, cell="cell") for search in found], [])
    assert alike is not None
    assert [search["name"].rpartition(" ")[2] for search in alike["searches"]] == ["#1", "#2"]


@pytest.mark.parametrize("changed", [{"code_hash": "old"}, {"device": {"name": "another"}}])
def test_records_of_other_code_or_devices_are_left_out(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    old = measured(tmp_path, 1.0, 50, "old")
    old.provenance = {**old.provenance, **changed, "started_at": "2020-01-01T00:00:00+0000"}
    again(tmp_path, old, "oldcell")
    searched(tmp_path, 1.0, 0, "new")
    (search,) = capacity.find(read_rows(tmp_path)[0])
    assert [(row["blocks"], row["verdict"]) for row in search.capacity.rows()] == [(RUNS, "holds")]
    assert (search.cell, search.left_out) == ("newcell", 1)


def test_of_a_block_that_was_measured_again_the_newest_counts(tmp_path: Path) -> None:
    old = measured(tmp_path, 1.0, 50, "old")
    old.provenance = {**old.provenance, "started_at": "2020-01-01T00:00:00+0000"}
    again(tmp_path, old, "oldcell")
    searched(tmp_path, 1.0, 0, "new")
    (search,) = capacity.find(read_rows(tmp_path)[0])
    assert [(row["blocks"], row["requests"], row["verdict"]) for row in search.capacity.rows()] == [
        (RUNS, 100 * RUNS, "holds")
    ]


def test_the_newest_search_sets_the_objectives(tmp_path: Path) -> None:
    """Its records are those of before where it found them: they are judged by what it asks for."""
    for seed in range(RUNS):
        old = measured(tmp_path, 1.0, 50, "old", slo=200.0, seed=seed)
        old.provenance = {**old.provenance, "started_at": "2020-01-01T00:00:00+0000"}
        again(tmp_path, old, f"oldcell-oldrate1-{seed}")
    searched(tmp_path, 2.0, 0, "new", slo=400.0)
    (search,) = capacity.find(read_rows(tmp_path)[0])
    assert search.limits == {"ttft_ms": 400.0}
    assert [(row["rate"], row["verdict"]) for row in search.capacity.rows()] == [
        (1, "holds"),
        (2, "holds"),
    ]


def test_records_of_other_tasks_are_no_search(tmp_path: Path) -> None:
    write_record(tmp_path / "s" / "r", make_record())
    rows, _ = read_rows(tmp_path)
    assert capacity.CapacityStudy().finding(ReportInputs(rows)) is None
