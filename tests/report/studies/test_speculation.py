"""What drafts are worth, beside the same cells without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minivllm.analysis.cells import gather
from minivllm.analysis.rows import read_rows
from minivllm.bench.records.measurement import SIMULATED
from minivllm.report.studies.speculation import (
    answer,
    by_acceptance,
    by_load,
    draft_gains,
    rows,
    statements,
)
from tests.report.pagereader import build_report
from tests.report.synthetic import make_record, write


def record(index: int, speed: float, proposer: str | None, requests: int = 1, **knobs: Any) -> Any:
    """A cell of `requests` at once with `speed` tokens a second."""
    one = make_record(index=index)
    one.cell_id = one.run_id = f"{proposer}-{requests}-{knobs}"
    one.metrics.output_tokens_per_s = speed
    one.config["workload"] = {"num_requests": requests}
    one.config["decoding"] = {"temperature": 0.0}
    none = {"_target_": "minivllm.extras.speculative.proposer.NoProposer"}
    one.config["speculative"] = none if proposer is None else {"_target_": "p.P", **knobs}
    one.config["choices"]["speculative"] = proposer or "none"
    return one


def cells_of(folder: Path, records: list[Any]) -> list[Any]:
    return gather(read_rows(write(folder, records))[0])


KNOBS = {"num_speculative_tokens": 4, "adaptive": False, "acceptance": None}


def test_a_cell_is_compared_with_the_one_without_drafts(tmp_path: Path) -> None:
    cells = cells_of(
        tmp_path,
        [
            record(0, 100, None),
            record(1, 150, "ngram", **KNOBS),
            record(2, 400, None, 8),
            record(3, 300, "ngram", 8, **KNOBS),
            record(4, 1, "suffix", 32, **KNOBS),  # nothing without drafts is beside it
        ],
    )
    found = {(one.proposer, one.requests): one for one in draft_gains(cells)}
    assert {key: one.speedup.ratio for key, one in found.items()} == pytest.approx(
        {("ngram", 1.0): 1.5, ("ngram", 8.0): 0.75}
    )
    lines = statements(list(found.values()))
    assert "1 request at once: ngram gives the most, 1.50×" in lines[0]
    assert "8 requests at once: ngram gives the most, 0.750×" in lines[1]
    chart = by_load(list(found.values()))
    assert chart is not None and chart.rows[0][1][0].series[1].y == pytest.approx([1.5, 0.75])


def test_that_cells_were_measured_apart_is_said_once(tmp_path: Path) -> None:
    made = []
    for index, (speed, proposer, load) in enumerate(
        [(100, None, 1), (150, "ngram", 1), (100, None, 8), (90, "ngram", 8)]
    ):
        for block in range(2):
            one = record(2 * index + block, speed, proposer, load, **(KNOBS if proposer else {}))
            one.block, one.run_id = block, f"{one.run_id}-{block}"
            moment = f"2025-03-04T10:{2 * index + block:02d}:00+0000"
            one.provenance = {**one.provenance, "started_at": moment}
            made.append(one)
    found = draft_gains(cells_of(tmp_path, made))
    assert answer(found) == (
        "Drafts give 1.50× with 1 request at once (ngram) and give 0.900× with 8 requests at once "
        "(ngram) (measured apart, so without an interval)."
    )
    lines = statements(found)
    assert lines[0] == "1 request at once: ngram gives the most, 1.50× at temperature 0."
    assert lines[-1] == "Cells were measured apart, so no ratio has an interval."


def test_a_set_acceptance_is_named_and_has_its_own_figure(tmp_path: Path) -> None:
    made = [record(0, 100, None)]
    for index, rate in enumerate((0.25, 0.75), 1):
        one = record(index, 100 * (0.5 + rate), "draft", **{**KNOBS, "acceptance": rate})
        made.append(one)
    found = draft_gains(cells_of(tmp_path, made))
    assert len(found) == 2 and all(one.given for one in found)
    assert by_load(found) is None
    assert any("set, not measured" in line for line in statements(found))
    assert all("(set)" in row[7] for row in rows(found))
    assert by_acceptance(found) is None  # no record has its acceptance


def test_a_simulated_cell_is_no_baseline_of_a_measured_one(tmp_path: Path) -> None:
    simulated = record(2, 900, None)
    simulated.cell_id = simulated.run_id = "simulated"
    simulated.config["engine"] = {"_target_": SIMULATED}
    made = [record(0, 100, None), record(1, 150, "ngram", **KNOBS), simulated]
    (found,) = draft_gains(cells_of(tmp_path, made))
    assert found.speedup.ratio == pytest.approx(1.5)


def test_the_page_has_the_section(tmp_path: Path) -> None:
    cells = [record(0, 100, None), record(1, 150, "ngram", **KNOBS)]
    page = build_report(write(tmp_path / "runs", cells), tmp_path / "out")
    assert "When do drafts pay?" in page.read_text(encoding="utf-8")
    assert "1.50×" in (tmp_path / "out" / "speculation.md").read_text()
