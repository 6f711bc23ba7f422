"""The section on drafts: there only if records tell of them, and true to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minivllm.bench.records.feature_figures import SpeculationFigures
from minivllm.bench.records.record import Record
from minivllm.report.inputs import ReportInputs, read
from minivllm.report.studies.drafts import MOST_CELLS, DraftsStudy, by_position
from tests.report.pagereader import build
from tests.report.synthetic import make_record, make_sweep

STUDY = DraftsStudy()


def drafting(proposer: str = "ngram", block: int = 0, index: int = 0, **changes: Any) -> Record:
    figures: dict[str, Any] = dict(
        proposer=proposer,
        num_speculative_tokens=3,
        adaptive=True,
        verify="same_noise",
        num_drafts=1000,
        num_draft_tokens=3000,
        num_accepted_tokens=1230,
        draft_acceptance_rate=0.41,
        mean_acceptance_length=2.23,
        acceptance_by_position=[0.7, 0.4, 0.13],
        acceptance_by_length={"3": 0.41},
        tokens_per_step=1.9,
        draft_ms=0.25,
        verify_ms=12.0,
        plain_ms=10.0,
        token_acceptance=0.62,
        break_even_acceptance=0.19,
    )
    record = make_record(
        "nf4", "continuous", block, index, speculation=SpeculationFigures(**figures | changes)
    )
    record.config["choices"]["speculative"] = record.arm = proposer
    record.run_id, record.cell_id = f"{proposer}{block}{index}".ljust(12, "0"), proposer
    return record


def found(inputs: ReportInputs) -> list[Any]:
    result = STUDY.find(inputs)
    assert result is not None
    return result


def test_nothing_of_it_without_drafts(tmp_path: Path) -> None:
    (tmp_path / "reports" / "r").mkdir(parents=True)
    (tmp_path / "reports" / "r" / "acceptance.png").write_text("of an earlier report")
    page, out = build(tmp_path, make_sweep(1))
    assert 'id="drafts"' not in page.source and not (out / "acceptance.png").exists()


def test_a_lone_run_is_told_in_one_line(tmp_path: Path) -> None:
    page, out = build(tmp_path, [drafting()])
    inputs = read(tmp_path / "runs")
    (line,) = STUDY.statements(found(inputs), inputs)
    assert line == (
        "Speculation (ngram, up to 3 tokens): 41.0 % of 3,000 draft tokens accepted, 1.90 tokens a "
        "step; draft 0.250 ms, verify 12.0 ms, plain step 10.0 ms, so that drafts pay from a token "
        "acceptance of 0.190 on (0.620 here: they pay)."
    )
    assert line in page.text and STUDY.tables(found(inputs), inputs) == []
    assert (out / "acceptance.png").exists()
    assert "At the first position: 70 %" in page.source


def test_costs_without_a_comparison_and_drafts_that_do_not_pay(tmp_path: Path) -> None:
    build(tmp_path, [drafting(plain_ms=None, break_even_acceptance=None)])
    inputs = read(tmp_path / "runs")
    (line,) = STUDY.statements(found(inputs), inputs)
    assert line.endswith("1.90 tokens a step; draft 0.250 ms, verify 12.0 ms.")
    build(tmp_path / "slow", [drafting(break_even_acceptance=1.4)])
    inputs = read(tmp_path / "slow" / "runs")
    (line,) = STUDY.statements(found(inputs), inputs)
    assert line.endswith("of 1.40 on (0.620 here: they do not pay).")
    nothing = drafting(num_drafts=0, acceptance_by_position=[], token_acceptance=None)
    page, _ = build(tmp_path / "none", [nothing])
    assert "Speculation (ngram): no draft was made." in page.text
    assert 'id="figure-acceptance"' not in page.source


def test_several_cells_have_a_row_each_on_the_page_and_in_the_terminal(tmp_path: Path) -> None:
    records = [
        drafting(proposer, block, index, num_drafts=1000 + 200 * block)
        for block in range(2)
        for index, proposer in enumerate(("ngram", "suffix"))
    ]
    page, _ = build(tmp_path, records)
    assert (
        "ngram ok 1,100 1,000–1,200 3,000 41.0 2.23 1.90 0.250 12.0 10.0 0.620 0.190" in page.text
    )
    assert "suffix ok 1,100" in page.text
    inputs = read(tmp_path / "runs")
    assert STUDY.statements(found(inputs), inputs) == []
    (shown,) = STUDY.tables(found(inputs), inputs)
    assert shown.row_count == 2


def test_a_set_acceptance_is_marked_wherever_its_figures_are(tmp_path: Path) -> None:
    given = drafting(given_acceptance=[0.7])
    page, _ = build(tmp_path, [given])
    inputs = read(tmp_path / "runs")
    (line,) = STUDY.statements(found(inputs), inputs)
    assert "draft tokens accepted (acceptance set)," in line
    assert "ok, acceptance set" in page.text and "outputs mean nothing" in page.text
    two = [given, drafting("suffix", index=1)]
    build(tmp_path / "two", two)
    inputs = read(tmp_path / "two" / "runs")
    (shown,) = STUDY.tables(found(inputs), inputs)
    marked = [str(cell) for column in shown.columns for cell in column.cells]
    assert marked.count("ok, acceptance set") == 1


def test_acceptance_by_position_is_the_mean_over_blocks(tmp_path: Path) -> None:
    longer, shorter = [0.8, 0.5], [0.6]
    records = [
        drafting(block=block, acceptance_by_position=shares)
        for block, shares in enumerate((longer, shorter))
    ]
    build(tmp_path, records)
    (cell,) = read(tmp_path / "runs").cells
    assert by_position(cell) == [0.7, 0.25]


def test_of_many_cells_the_first_are_drawn(tmp_path: Path) -> None:
    records = [drafting(f"mine{index}", index=index) for index in range(MOST_CELLS + 1)]
    build(tmp_path, records)
    inputs = read(tmp_path / "runs")
    (drawing,) = STUDY.figures(found(inputs), inputs)
    assert drawing is not None
    assert f"The first {MOST_CELLS} of {MOST_CELLS + 1} cells" in drawing.caption


def test_the_breakdown_has_drafting_where_a_model_drafts(tmp_path: Path) -> None:
    plain, drafts = drafting(), drafting("draft", index=1)
    drafts.breakdown.draft_ms = 3.0
    page, _ = build(tmp_path, [plain])
    assert "phases (schedule, prepare," in page.source
    page, _ = build(tmp_path / "two", [plain, drafts])
    assert "phases (schedule, draft, prepare," in page.source


def test_cells_with_drafts_of_several_lengths_stand_in_one_table(tmp_path: Path) -> None:
    records = [
        drafting(acceptance_by_position=[0.8, 0.5, 0.2]),
        drafting("suffix", index=1, acceptance_by_position=[0.7]),
    ]
    page, _ = build(tmp_path, records)
    assert "80.0 50.0 20.0" in page.text and "70.0 – –" in page.text
