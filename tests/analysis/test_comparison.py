"""Two runs against each other: regressions are found, and what cannot be told is not told."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any, get_args

import pytest

from minivllm.analysis.ablation.design import Design
from minivllm.analysis.cells import gather
from minivllm.analysis.compared import ChangeVerdict, percent
from minivllm.analysis.comparison import Comparison, compare
from minivllm.analysis.rows import Row
from minivllm.bench.records.identity import QUALITY_TASK
from minivllm.errors import BadInput
from minivllm.report.figures.chart import draw, keys
from minivllm.report.figures.palette import NEUTRAL
from minivllm.report.figures.style import WIDE
from minivllm.report.studies.standalone import comparison
from tests.experiments.synthetic import ablation_rows

TWO = Design("add_one_in", {"a": (), "b": ()})


def run_rows(
    factor: float = 1.0, seed: int = 0, blocks: int = 6, noise: float = 0.005, day: int = 1
) -> list[Row]:
    """A run of three cells, `with a` slower or faster by a factor."""
    rows = ablation_rows(
        TWO, {"a": 1.5 * factor, "b": 1.2}, blocks=blocks, noise=noise, seed=seed, ablation=None
    )
    kept = [row for row in rows if row["arm"] != "baseline again"]
    for row in kept:
        # The blocks' common drift is what two runs do not share.
        row["provenance.started_at"] = row["provenance.started_at"].replace(
            "2025-01-01", f"2025-01-{day:02d}"
        )
    return kept


def compared(before: list[Row], after: list[Row], **given: Any) -> Comparison:
    return compare(
        before,
        after,
        given.get("metric", "output_tokens_per_s"),
        given.get("threshold", 0.02),
        given.get("margin", 0.25),
    )


def quiet(rows: list[Row]) -> list[Row]:
    """Without the drift from block to block: every block is as its cell's first."""
    first = {row["arm"]: row["metrics.output_tokens_per_s"] for row in rows if row["block"] == 0}
    for row in rows:
        row["metrics.output_tokens_per_s"] = first[row["arm"]] * (1 + 0.002 * (row["block"] % 3))
    return rows


def test_a_slowdown_is_a_regression() -> None:
    found = compared(quiet(run_rows()), quiet(run_rows(0.9, day=2)))
    verdicts = {cell.label: cell.verdict for cell in found.cells}
    assert (
        list(verdicts.values()).count("slower") == 1 and list(verdicts.values()).count("none") == 2
    )
    (slow,) = (cell for cell in found.cells if cell.verdict == "slower")
    assert slow.cell_id == "a" and slow.method == "two samples"
    assert slow.low is not None and slow.high is not None and slow.low <= 0.9 <= slow.high
    assert found.exit_code == 1 and found.conclusion.startswith("Regression")


def test_what_may_be_much_slower_is_undecided() -> None:
    after = quiet(run_rows(day=2))
    for row in after:
        if row["cell_id"] == "a":
            row["metrics.output_tokens_per_s"] *= 1.0 if row["block"] % 2 else 0.05
    found = compared(quiet(run_rows()), after)
    (cell,) = (cell for cell in found.cells if cell.verdict == "undecided")
    assert cell.cell_id == "a" and cell.p_holm is not None and cell.p_holm > 0.05
    assert cell.loss is not None and cell.loss > 0.25 and "is not excluded" in cell.reason
    assert found.exit_code == 3 and found.conclusion.startswith("Undecided: ")
    assert compared(quiet(run_rows()), after, margin=1.0).exit_code == 0


@pytest.mark.parametrize("slow", ["x", "y"])
def test_blocks_of_several_hosts_all_count(slow: str) -> None:
    """Each host numbers its blocks from 0."""

    def on_both(factors: dict[str, float], day: int) -> list[Row]:
        rows = []
        for host, factor in factors.items():
            mine = quiet(run_rows(factor, day=day))
            rows += [{**row, "provenance.host": host} for row in mine]
        return rows

    found = compared(on_both({"x": 1, "y": 1}, 1), on_both({"x": 1, "y": 1, slow: 0.8}, 2))
    (cell,) = (cell for cell in found.cells if cell.cell_id == "a")
    assert cell.blocks == (12, 12) and cell.ratio == pytest.approx(0.8**0.5, rel=0.02)


def test_no_difference_and_a_gain_are_no_regression() -> None:
    same = compared(quiet(run_rows()), quiet(run_rows(day=2)))
    assert {cell.verdict for cell in same.cells} == {"none"} and same.exit_code == 0
    assert same.conclusion.startswith(
        "No regression of output_tokens_per_s beyond 2 % was found in 3 of 3 shared cells; the "
        "intervals exclude a loss of"
    )
    gain = compared(quiet(run_rows()), quiet(run_rows(1.2, day=2)))
    assert (
        sorted(cell.verdict for cell in gain.cells) == ["faster", "none", "none"]
        and gain.exit_code == 0
    )


def test_a_change_below_the_threshold_is_none_however_certain() -> None:
    before, after = quiet(run_rows()), quiet(run_rows(0.97, day=2))
    assert compared(before, after, threshold=0.05).exit_code == 0
    assert compared(before, after, threshold=0.01).exit_code == 1


def test_blocks_measured_in_turn_are_paired() -> None:
    """Drift of 10 % from block to block hides 3 % between samples, and cancels in pairs."""
    before, after = run_rows(blocks=8), run_rows(0.95, blocks=8)
    for row in after:  # each block a minute after the other run's, within the same hour
        row["provenance.started_at"] = row["provenance.started_at"].replace(":00+", ":30+")
    found = compared(before, after)
    assert {cell.method for cell in found.cells} == {"paired"}
    assert found.exit_code == 1
    apart = compared(before, run_rows(0.95, blocks=8, seed=1, day=2))
    assert {cell.method for cell in apart.cells} == {"two samples"} and apart.exit_code == 0


def test_the_threshold_is_of_the_ratio_both_ways() -> None:
    """-4.8 % is a change of less than 5 %, though its logarithm is more than that of 1.05."""
    assert compared(quiet(run_rows()), quiet(run_rows(0.952, day=2)), threshold=0.05).exit_code == 0
    assert compared(quiet(run_rows()), quiet(run_rows(0.945, day=2)), threshold=0.05).exit_code == 1


@pytest.mark.parametrize(
    "run_id", ["0", "z"]
)  # before and behind the speed in the order of a block's records
def test_quality_that_was_measured_alone_takes_no_block_away(run_id: str) -> None:
    before, after = quiet(run_rows()), quiet(run_rows(0.9, day=2))
    alone = [
        row
        | {
            "run_id": run_id,
            "config.task._target_": QUALITY_TASK,
            "metrics.output_tokens_per_s": None,
            "quality.perplexity": 15.0,
        }
        for row in before
    ]
    assert compared([*before, *alone], after) == compared(before, after)
    assert compared(before, after).exit_code == 1


def test_blocks_without_any_output_are_not_passed_over() -> None:
    before, after = quiet(run_rows()), quiet(run_rows(day=2))
    for row in after:
        if row["block"] % 2 and row["arm"] == "with a":
            row["metrics.output_tokens_per_s"] = 0.0
    found = compared(before, after)
    (lost,) = (cell for cell in found.cells if cell.verdict == "failed")
    assert "it is 0 in 3 blocks" in lost.reason and found.exit_code == 1
    turned = compared(after, before)
    assert [cell.reason for cell in turned.cells if cell.verdict == "not comparable"] == [
        "the first run has no output_tokens_per_s of it (it is 0 in 3 blocks, and nothing can "
        "be divided by that)"
    ]


def test_latency_grows_when_it_gets_worse() -> None:
    before, after = run_rows(), run_rows(day=2)
    for rows, latency in ((before, 10.0), (after, 12.0)):
        for row in rows:
            row["metrics.itl_ms.p50"] = latency + 0.01 * row["block"]
    found = compared(before, after, metric="itl_ms.p50")
    assert {cell.verdict for cell in found.cells} == {"slower"} and found.direction == "lower"
    with pytest.raises(BadInput, match="no such figure"):
        compared(before, after, metric="speed")


def test_a_cell_that_fails_now_is_a_regression() -> None:
    after = quiet(run_rows(day=2))
    for row in after:
        if row["arm"] == "with a":
            row["status"] = "oom"
    found = compared(quiet(run_rows()), after)
    assert found.exit_code == 1 and [cell.verdict for cell in found.cells].count("failed") == 1
    turned = compared(after, quiet(run_rows()))
    assert turned.exit_code == 3 and "the first run has no" in turned.conclusion


def test_a_cell_of_which_some_blocks_fail_now_is_a_regression() -> None:
    before, after = quiet(run_rows()), quiet(run_rows(day=2))
    for row in after:
        if row["arm"] == "with a" and row["block"] < 2:
            row["status"] = "crashed"
    found = compared(before, after)
    (failed,) = (cell for cell in found.cells if cell.verdict == "failed")
    assert failed.reason == "2 blocks failed, in the second run only" and failed.ratio is not None
    assert found.exit_code == 1 and failed.reason in found.conclusion
    for row in before:
        if row["arm"] == "with a" and row["block"] == 5:
            row["status"] = "oom"
    assert compared(before, after).exit_code == 0  # it did so before
    for row in after:
        if row["status"] == "crashed":
            row["status"] = "invalid"  # the machine was not fit to measure
    assert compared(quiet(run_rows()), after).exit_code == 0


def test_blocks_that_fail_elsewhere_are_no_regression() -> None:
    """Another device, or quality that was measured by itself."""
    before, after = quiet(run_rows()), quiet(run_rows(day=2))
    broken = next(row for row in after if row["arm"] == "with a")
    quality = {**broken, "run_id": "q", "status": "error", "config.task._target_": QUALITY_TASK}
    assert compared(before, [*after, quality]).exit_code == 0
    for row in after:
        row["provenance.device.name"] = "another"
    broken["status"] = "oom"
    found = compared(before, after)
    assert found.exit_code == 3 and {cell.verdict for cell in found.cells} == {"not comparable"}


def test_a_cell_that_fails_now_takes_no_blocks_from_the_others() -> None:
    """Four blocks of each run are enough for one test, and a cell without figures is not tested."""
    before, after = quiet(run_rows(blocks=4)), quiet(run_rows(blocks=4, day=2))
    arms = ("with a", "with b")
    before, after = ([row for row in rows if row["arm"] in arms] for rows in (before, after))
    for row in after:
        if row["arm"] == "with b":
            row["status"] = "oom"
    found = compared(before, after)
    assert {cell.cell_id: cell.verdict for cell in found.cells} == {"a": "none", "b": "failed"}


def test_other_devices_are_not_comparable() -> None:
    after = run_rows(day=2)
    for row in after:
        row["provenance.device.name"] = "another"
    found = compared(run_rows(), after)
    assert found.exit_code == 3 and "other devices" in found.conclusion


def test_too_few_blocks_are_not_comparable() -> None:
    found = compared(run_rows(blocks=1), run_rows(0.5, blocks=1, day=2))
    assert (
        found.exit_code == 3
        and "too few for a verdict: use measure.repeats=5 in both" in found.conclusion
    )
    assert found.cells[0].ratio is not None  # shown, but not judged


@pytest.mark.parametrize("counts", [(3, 6), (2, 12), (6, 3)])
def test_uneven_blocks_without_an_interval_pass_nothing(counts: tuple[int, int]) -> None:
    """They are enough for a verdict, but one that finds nothing has no interval that excludes a
    loss."""
    before, after = (
        [row for row in quiet(run_rows(factor, blocks=n, day=day)) if row["cell_id"] == "a"]
        for factor, n, day in ((1.0, counts[0], 1), (0.75, counts[1], 2))
    )
    slow = compared(before, after)
    assert [cell.verdict for cell in slow.cells] == ["slower"] and slow.exit_code == 1
    for row in after[:2]:  # now the figures of both runs meet
        row["metrics.output_tokens_per_s"] = before[0]["metrics.output_tokens_per_s"] * 1.1
    found = compared(before, after)
    (cell,) = found.cells
    assert cell.low is None and cell.loss is None and found.exit_code == 3
    assert found.conclusion.startswith("Undecided: ") and found.conclusion.endswith(
        f"{counts[0]} and {counts[1]} blocks give no interval, so no loss is excluded: "
        "use measure.repeats=4 in both."
    )


def test_the_blocks_asked_for_are_enough_for_as_many_cells() -> None:
    """Four of each would give an interval, but no verdict of three cells."""
    before, after = quiet(run_rows(blocks=3)), quiet(run_rows(blocks=9, day=2))
    found = compared(before, after)
    assert [cell.verdict for cell in found.cells] == ["undecided"] * 3
    assert found.conclusion.endswith("use measure.repeats=5 in both.")


def test_cells_without_an_interval_are_not_counted_among_those_that_exclude_a_loss() -> None:
    """One cell is plainly faster over three blocks of one run; the others have an interval."""
    before, after = quiet(run_rows(blocks=12)), quiet(run_rows(2.0, blocks=12, day=2))
    before = [row for row in before if row["cell_id"] != "a" or row["block"] < 3]
    found = compared(before, after)
    (faster,) = (cell for cell in found.cells if cell.verdict == "faster")
    assert faster.loss is None and found.exit_code == 0
    assert "found in 3 of 3 shared cells; the intervals exclude a loss of" in found.conclusion
    assert found.conclusion.endswith(" % in 2 of them.")


@pytest.mark.parametrize(
    ("loss", "excluded", "possible"),
    [
        (0.05149, "5.2 %", "5.1 %"),
        (0.051, "5.1 %", "5.1 %"),
        (0.2561, "26 %", "25 %"),
        (0.9951, "100 %", "99 %"),
        (1.234, "130 %", "120 %"),
        (0.0, "0 %", "0 %"),
    ],
)
def test_no_more_is_claimed_of_a_loss_than_its_interval_says(
    loss: float, excluded: str, possible: str
) -> None:
    assert percent(loss, math.ceil) == excluded and percent(loss, math.floor) == possible
    cell = replace(compared(quiet(run_rows()), quiet(run_rows(day=2))).cells[0], loss=loss)
    said = Comparison("speed", "higher", 0.02, (cell,), (), ()).conclusion
    assert said.endswith(f"the intervals exclude a loss of more than {excluded}.")


def test_runs_without_a_common_cell_are_not_comparable() -> None:
    after = run_rows(day=2)
    for row in after:
        row["cell_id"] += " of another model"
    found = compared(run_rows(), after)
    assert found.cells == () and len(found.only_before) == len(found.only_after) == 3
    assert found.exit_code == 3 and "no cell in common" in found.conclusion


def test_a_cell_that_is_refused_now_is_a_regression() -> None:
    """It has no identity any more, since its configuration has none."""
    after = [row for row in quiet(run_rows(day=2)) if row["arm"] != "with a" or not row["block"]]
    for row in after:
        if row["arm"] == "with a":
            row |= {
                "cell_id": "invalid",
                "status": "invalid",
                "error.type": "BadInput",
                "workload_hash": None,
            }
    found = compared(quiet(run_rows()), after)
    (failed,) = (cell for cell in found.cells if cell.verdict == "failed")
    assert failed.cell_id == "a" and "(invalid)" in failed.reason and found.exit_code == 1
    assert found.only_before == found.only_after == ()


def test_a_cell_that_is_missing_now_is_not_passed_over() -> None:
    after = [row for row in quiet(run_rows(day=2)) if row["arm"] != "with a"]
    found = compared(quiet(run_rows()), after)
    assert len(found.cells) == 2 and len(found.only_before) == 1
    assert found.exit_code == 3 and "the second run has no such cell" in found.conclusion
    assert compared(after, quiet(run_rows())).exit_code == 0  # a new one is no matter


def test_means_are_those_of_every_table() -> None:
    """Arithmetic, as a cell's own."""
    before, after = quiet(run_rows()), quiet(run_rows(0.9, day=2))
    found = compared(before, after)
    means = {cell.cell_id: cell.mean("metrics.output_tokens_per_s") for cell in gather(before)}
    assert {cell.cell_id: cell.before for cell in found.cells} == pytest.approx(means)
    text = comparison.markdown(found, ("before", "after"))
    assert "means are arithmetic, over blocks" in text and "geometric" not in text


def test_none_says_why_where_the_p_value_seems_to_deny_it() -> None:
    found = compared(quiet(run_rows()), quiet(run_rows(0.97, day=2)), threshold=0.05)
    (small,) = (cell for cell in found.cells if cell.p_holm is not None and cell.p_holm <= 0.05)
    assert (small.verdict, small.reason) == (
        "none",
        "found, but of no more than task.threshold, 5 %",
    )


def test_blocks_without_a_figure_are_told() -> None:
    before, after = quiet(run_rows(blocks=8)), quiet(run_rows(blocks=8, day=2))
    for row in after:
        if row["arm"] == "with a" and row["block"] < 3:
            row["metrics.output_tokens_per_s"] = (None, math.nan, math.inf)[row["block"]]
    note, turns = compared(before, after).notes
    assert turns.startswith("The runs did not take turns, so a change of the machine")
    assert (
        "3 of 8 blocks of the second run have no output_tokens_per_s (3 no figure) and are left "
        "out" in note
    )


def test_ratios_are_drawn_on_a_logarithmic_axis() -> None:
    """Half as much lies as far from 1 as twice as much, and an end that says nothing is cut."""
    found = compared(quiet(run_rows()), quiet(run_rows(0.5, day=2)))
    endless = replace(found, cells=tuple(replace(cell, low=1e-9, high=1e9) for cell in found.cells))
    chart = comparison.figure(endless, ("before", "after"))
    assert chart is not None
    (axes,) = draw(chart, WIDE).axes
    assert axes.get_xscale() == "log" and axes.get_xlim()[0] > 1e-4 and axes.get_xlim()[1] < 1e4


def test_only_what_passed_is_drawn_in_grey() -> None:
    found = compared(quiet(run_rows()), quiet(run_rows(day=2)))
    every: tuple[ChangeVerdict, ...] = get_args(ChangeVerdict)
    cells = tuple(replace(found.cells[0], label=verdict, verdict=verdict) for verdict in every)
    chart = comparison.figure(replace(found, cells=cells), ("before", "after"))
    assert chart is not None
    (legend,) = draw(chart, WIDE).legends
    assert [key["label"] for key in keys(chart) if key["colour"] == NEUTRAL] == ["none"]
    assert {text.get_text() for text in legend.get_texts()} == {*every}


def test_arms_of_one_cell_are_matched_by_name() -> None:
    """The A/A arm of an ablation has the baseline's cell_id."""
    before = ablation_rows(TWO, {}, blocks=6)
    found = compared(before, ablation_rows(TWO, {}, blocks=6, seed=1))
    assert len(found.cells) == 4 and not found.only_before


def test_a_lone_run_is_matched_with_a_sweep() -> None:
    before, after = run_rows(), run_rows(day=2)
    for row in before:
        row["arm"] = f"as a lone run calls {row['arm']}"
    assert len(compared(before, after).cells) == 3


def test_times_with_and_without_a_zone_stand_side_by_side() -> None:
    """The same run, its times in other forms: nothing changes, and the newest is by time."""
    plain, mixed = run_rows(), run_rows()
    for i, row in enumerate(mixed):
        begun = datetime.fromisoformat(row["provenance.started_at"])
        zone = timezone(timedelta(hours=5 * (i % 3 - 1)))
        row["provenance.started_at"] = (
            begun.astimezone(zone).isoformat() if i % 4 else begun.replace(tzinfo=None).isoformat()
        )
    known, found = compared(run_rows(day=2), plain), compared(run_rows(day=2), mixed)
    assert (found.exit_code, found.notes) == (known.exit_code, known.notes)
    assert [cell.starts for cell in gather(mixed)] == [cell.starts for cell in gather(plain)]
    assert [cell.last_started for cell in gather(mixed)] == [
        cell.last_started for cell in gather(plain)
    ]
