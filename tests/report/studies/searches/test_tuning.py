"""What the report says of a search is what its records say: the best within the limits, and how far
to trust it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from minivllm.analysis.ablation.findings import Goal
from minivllm.bench.records.record import Record, Validity
from minivllm.report.figures.render import Described, Plot, finish
from minivllm.report.inputs import ReportInputs, read
from minivllm.report.studies.searches import tuning
from minivllm.report.studies.searches.trials import Tuning, heading
from tests.report.pagereader import Page, build, table
from tests.report.studies.test_precision import sweep_with_quality
from tests.report.synthetic import failed, make_record, write

OBJECTIVE, TTFT, ITL = "metrics.output_tokens_per_s", "metrics.ttft_ms.p90", "metrics.itl_ms.p90"
LIMITS = {TTFT: 100.0, ITL: 20.0}


def trial(index: int, speed: float, ttft: float = 90.0, itl: float = 10.0, **sweep: Any) -> Record:
    """A record of a search's trial that runs `index` sequences at once."""
    record = make_record(index=index, run_id=f"r{index}", cell_id=f"c{index}", arm=f"seqs={index}")
    record.position = index
    record.config["batching"]["max_num_seqs"] = index
    record.config["sweep"] = {
        "name": "s",
        "objective": OBJECTIVE,
        "direction": "maximize",
        "limits": LIMITS,
    }
    record.config["sweep"] |= sweep
    record.metrics.output_tokens_per_s = speed
    record.metrics.ttft_ms.p90, record.metrics.itl_ms.p90 = ttft, itl
    return record


def material(tmp_path: Path, *records: Record, goal: Goal | None = None) -> ReportInputs:
    return read(write(tmp_path / "runs", list(records), parquet=False), goal=goal)


def tuning_of(inputs: ReportInputs) -> Tuning | None:
    return tuning.TuningStudy().finding(inputs)


def finished(figures: Iterable[Described | None]) -> dict[str, Plot]:
    return {one.name: finish(one) for one in figures if one is not None}


def said(tmp_path: Path, *records: Record, goal: Goal | None = None) -> list[str]:
    found = tuning_of(material(tmp_path, *records, goal=goal))
    assert found is not None
    return tuning.sentences(found)


THREE = (
    (1, 50.0, 90.0, 10.0),
    (2, 70.0, 150.0, 10.0),
    (3, 60.0, 80.0, 20.0),
)  # the second is too slow to begin


def test_the_best_within_the_limits_leads(tmp_path: Path) -> None:
    headline, asked, figures, trust = said(tmp_path, *(trial(*one) for one in THREE))
    assert headline == "Best within the limits, Output 60.0 tok/s: max_num_seqs=3.".replace(
        "batching.", ""
    )
    assert asked == (
        "Searched for: the most Output (tok/s) with TTFT p90 ≤ 100 ms and ITL p90 ≤ 20 ms: 2 of "
        "3 trials kept within these limits."
    )
    assert figures == "Its limited figures: TTFT p90 80.0 ms and ITL p90 20.0 ms."
    assert trust.startswith("It was chosen of 2 for looking best")


def test_where_the_load_sets_what_was_searched_for_no_trial_is_best(tmp_path: Path) -> None:
    """Every trial that keeps up with the arrivals has their throughput."""
    records = [trial(*one) for one in THREE]
    for record, e2e_ms in zip(records, (800.0, 900.0, 700.0), strict=True):
        record.config["choices"]["arrival"] = "poisson"
        record.metrics.queue_ms.mean, record.metrics.e2e_ms.p50 = 5.0, e2e_ms
    headline, asked, lowest, remedy = said(tmp_path, *records)
    assert headline == (
        "No trial is best by Output: 2 of 2 within the limits kept up with the pace at which "
        "requests came, so the load sets it."
    )
    assert asked.startswith("Searched for: the most Output")
    assert lowest == "Of these E2E p50 is lowest, 700 ms, in max_num_seqs=3."
    assert "sweep.direction=minimize sweep.objective=metrics.e2e_ms.p50" in remedy
    for record in records:
        record.metrics.queue_ms.mean = 1e3 * (
            record.metrics.duration_s or 0.0
        )  # a queue that grew: the engine's own
    assert said(tmp_path / "behind", *records)[0].startswith("Best within the limits")


def test_the_least_where_less_is_better(tmp_path: Path) -> None:
    goal = {"objective": TTFT, "direction": "minimize", "limits": {}}
    headline, asked, *_ = said(tmp_path, *(trial(*one, **goal) for one in THREE))
    assert headline == "Best, TTFT p90 80.0 ms: max_num_seqs=3."
    assert asked == "Searched for: the least TTFT p90 (ms), in 3 trials."


def test_equals_are_told(tmp_path: Path) -> None:
    headline, *_ = said(tmp_path, trial(1, 60.04), trial(2, 60.0), trial(3, 50.0))
    assert (
        headline == "Best within the limits, Output 60.0 tok/s: max_num_seqs=1; the same in "
        "max_num_seqs=2."
    )


def test_without_any_within_them_the_nearest_is_named(tmp_path: Path) -> None:
    headline, asked = said(
        tmp_path, trial(1, 50.0, ttft=300.0), trial(2, 40.0, ttft=110.0, itl=21.0)
    )
    assert headline == (
        "No trial is within the limits; the nearest, TTFT p90 110 ms against 100 and ITL p90 "
        "21.0 ms against 20: max_num_seqs=2."
    )
    assert asked.endswith(": 0 of 2 trials kept within these limits.")


def test_a_failure_is_never_the_best_and_no_figure_is_no_zero(tmp_path: Path) -> None:
    lost = failed(trial(1, 90.0), "oom", "MemoryError", "no room")
    unknown = trial(2, 80.0)
    unknown.metrics.ttft_ms.p90 = None  # of too few requests
    headline, *_ = said(tmp_path, lost, unknown, trial(3, 10.0))
    assert headline.endswith(": max_num_seqs=3.")
    found = tuning_of(material(tmp_path, lost, unknown, trial(3, 10.0)))
    assert found is not None
    told = [(one.number, found.status(one)) for one in found.ranked]
    assert told == [(3, "within"), (2, "no figure"), (1, "oom")]
    assert (
        said(tmp_path / "none", lost, unknown)[0]
        == "No trial has the figures that the search is about."
    )


def test_a_busy_trial_says_so_in_its_row_and_above(tmp_path: Path) -> None:
    busy = trial(2, 70.0)
    busy.validity = Validity(
        True, [], ["other processes used 30 % of a core on average during the window"]
    )
    page, _ = build(tmp_path, [trial(1, 50.0), busy], parquet=False)
    assert "within, busy" in page.text
    assert "Other processes used the machine while max_num_seqs=2 was measured" in page.text


def test_what_was_just_asked_for_goes_before_what_records_were_made_for(tmp_path: Path) -> None:
    records = [trial(*one) for one in THREE]
    assert (
        said(tmp_path, *records, goal=Goal(OBJECTIVE))[0]
        == "Best, Output 70.0 tok/s: max_num_seqs=2."
    )
    records[0].config["sweep"]["limits"] = {ITL: 15.0}
    # the newest says what it was for
    records[0].provenance["started_at"] = "2026-03-04T10:00:00+0000"
    assert said(tmp_path / "newer", *records)[0].endswith("Output 70.0 tok/s: max_num_seqs=2.")


def test_other_records_are_of_no_search(tmp_path: Path) -> None:
    plain = [trial(*one, objective=None) for one in THREE]
    assert tuning_of(material(tmp_path / "plain", *plain)) is None
    one, other = trial(1, 50.0), trial(2, 60.0)
    other.sweep = "another"
    write(tmp_path / "two", [one, other], parquet=False)
    assert tuning_of(read(tmp_path / "two")) is None


@pytest.mark.parametrize(
    ("name", "title", "unit"),
    [
        (OBJECTIVE, "Output", "tok/s"),
        ("metrics.e2e_ms.p90", "E2E p90", "ms"),
        ("metrics.goodput_requests_per_s", "Goodput requests", "per s"),
        ("metrics.steady.requests_per_s", "Steady requests", "per s"),
        ("memory.device_peak_reserved", "Device peak reserved", "GB"),
        ("memory.linear", "Linear", "GB"),
        ("breakdown.forward_ms", "Forward", "ms"),
        ("cold.load_s", "Load", "s"),
        ("quality.perplexity", "Perplexity", ""),
    ],
)
def test_every_number_of_a_record_has_a_heading(name: str, title: str, unit: str) -> None:
    column = heading(name)
    assert (column.key, column.title, column.unit) == (name, title, unit)


def test_the_page_leads_with_the_search(tmp_path: Path) -> None:
    records = [trial(*one) for one in THREE]
    page, out = build(tmp_path, records, parquet=False)
    assert page.text.index("Best within the limits") < page.text.index("What did the search find?")
    body = page.source[page.source.index("What did the search find?</h2>") :]
    rows = body[body.index("<tbody>") : body.index("</tbody>")].split("</tr>")[:-1]
    assert [row.partition("<td>")[2].partition("</td>")[0] for row in rows] == ["3", "1", "2"]
    assert "× first" not in page.text  # the first guess is no baseline
    assert {"tuning.png", "tuning_values.png"} <= {path.name for path in out.iterdir()}
    assert len(table(out)) == 3
    again, out = build(
        tmp_path / "plain", [trial(*one, objective=None) for one in THREE], parquet=False
    )
    assert isinstance(again, Page) and "What did the search find?" not in again.text
    assert not (out / "tuning.png").exists()


def test_the_terminal_ranks_trials(tmp_path: Path) -> None:
    found = tuning_of(material(tmp_path, *(trial(*one) for one in THREE)))
    assert found is not None
    shown = tuning.table(found)
    columns = [[str(cell) for cell in column.cells] for column in shown.columns]
    assert columns[0] == ["3", "1", "2"]
    assert columns[2] == ["within", "within", "outside"]
    assert columns[3:] == [
        ["60.0", "50.0", "70.0"],
        ["80.0", "90.0", "150"],
        ["20.0", "10.0", "10.0"],
    ]
    assert [str(column.header) for column in shown.columns][4] == "TTFT p90\nms ≤ 100"


def test_the_best_so_far_never_gets_worse_and_never_breaks_a_limit(tmp_path: Path) -> None:
    found = material(
        tmp_path,
        trial(1, 90.0, ttft=200.0),
        *(trial(i, s) for i, s in ((2, 50.0), (3, 40.0), (4, 60.0))),
    )
    plots = finished(tuning.figures(tuning_of(found)))
    assert set(plots) == {"tuning", "tuning_values"}
    labels = [key["label"] for key in plots["tuning"].legend]
    assert labels == ["best so far", "within the limits", "outside"]
    source = str(plots["tuning"].live[0]["panels"])
    assert "[2.0, 4.0, 4.0]" in source and "[50.0, 60.0, 60.0]" in source


def test_a_search_without_limits_has_no_words_about_them(tmp_path: Path) -> None:
    records = [trial(*one, limits={}) for one in THREE]
    page, _ = build(tmp_path, records, parquet=False)
    section = page.text[
        page.text.index("What did the search find?") : page.text.index("What was measured?")
    ]
    assert "imit" not in section and "within" not in section


def test_a_limit_on_the_objective_alone_leaves_no_empty_sentence(tmp_path: Path) -> None:
    lines = said(tmp_path, *(trial(*one, limits={OBJECTIVE: 65.0}) for one in THREE))
    assert lines[0].endswith(": max_num_seqs=3.") and not any("figures" in line for line in lines)


def test_trials_are_numbered_as_they_were_measured(tmp_path: Path) -> None:
    """A search that is gone on with counts its positions anew."""
    first, later = trial(2, 50.0), trial(1, 60.0)
    later.provenance["started_at"] = "2026-03-04T10:00:00+0000"
    found = tuning_of(material(tmp_path, first, later))
    assert found is not None
    assert [(one.cell.arm, one.number, one.index) for one in found.trials] == [
        ("seqs=2", 1, 1),
        ("seqs=1", 2, 0),
    ]


def test_records_that_do_not_say_which_way_is_better_are_of_no_search(tmp_path: Path) -> None:
    records = [trial(*one) for one in THREE]
    for record in records:
        del record.config["sweep"]["direction"]
    assert tuning_of(material(tmp_path, *records)) is None


def test_a_trial_of_which_a_block_failed_is_not_the_best(tmp_path: Path) -> None:
    """A mean over blocks is of all that were asked for."""
    whole = [trial(1, 50.0), trial(1, 54.0)]
    broken = [trial(2, 90.0), failed(trial(2, 90.0), "oom", "MemoryError", "no room")]
    for pair in (whole, broken):
        pair[1].block, pair[1].run_id = 1, pair[1].run_id + "again"
    headline, *_ = said(tmp_path, *whole, *broken)
    assert headline == "Best within the limits, Output 52.0 tok/s: max_num_seqs=1."


def test_quality_has_no_noise_to_be_warned_of(tmp_path: Path) -> None:
    records = sweep_with_quality()
    for position, record in enumerate(records):
        record.position = position
        goal = {"objective": "quality.kl_mean", "direction": "minimize", "limits": {}}
        record.config["sweep"] = {"name": "s", **goal}
    found = tuning_of(material(tmp_path, *records))
    assert found is not None
    values = [one.objective for one in found.ranked if one.objective is not None]
    assert values == sorted(values) and len(values) > 1
    assert len(tuning.sentences(found)) == 2


def test_what_the_figures_leave_out_is_said(tmp_path: Path) -> None:
    records = [trial(i, 10.0 * i) for i in range(1, 15)]
    for record in records:
        record.config["cache"]["block_size"] = 8 * (1 + record.position % 2)
    lost = failed(trial(20, 1.0), "oom", "MemoryError", "no room")
    lost.config["cache"]["block_size"] = 8
    plots = finished(tuning.figures(tuning_of(material(tmp_path, *records, lost))))
    assert "Not drawn: batching.max_num_seqs" in plots["tuning_values"].caption
    assert all(plot.caption.endswith("1 trial failed or has no figure.") for plot in plots.values())
