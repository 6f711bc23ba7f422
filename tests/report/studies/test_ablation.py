"""An ablation's report: the verdict first, with intervals, and no more than the analysis says."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minivllm.analysis.ablation.design import Design
from minivllm.analysis.ablation.effects import analyse
from minivllm.analysis.cells import gather
from minivllm.analysis.format import cut, interval, spanned
from minivllm.report.figures.cell_styles import CellStyles
from minivllm.report.figures.chart import keys
from minivllm.report.figures.render import finish
from minivllm.report.figures.scatter import trade_off
from minivllm.report.inputs import ReportInputs
from minivllm.report.sections import heading, place_of
from minivllm.report.studies import ablation
from minivllm.report.studies.effects import markdown_text
from minivllm.report.verdict import remarks
from tests.experiments.synthetic import ablation_rows
from tests.report.pagereader import Page, build_report

NAMES = {"prefix caching": (), "nf4": (), "graphs": ()}
EFFECTS = {"prefix caching": 1.42, "nf4": 0.9}


def rows_of(kind: str, **changes: Any) -> list[dict[str, Any]]:
    return ablation_rows(Design(kind, NAMES), EFFECTS, idle=["graphs"], **changes)  # type: ignore[arg-type]


def test_the_headline_is_what_each_is_worth_with_its_interval() -> None:
    rows = rows_of("leave_one_out")
    found = analyse(rows)
    assert found is not None
    message = ablation.verdict(found, gather(rows))
    caching, nf4, _ = found.effects
    assert caching.ratio is not None and math.isclose(caching.ratio, 1.42, rel_tol=0.02)
    assert message.headline == (
        "What each optimisation is worth in output tokens/s: prefix caching "
        f"{spanned(caching.ratio, caching.low, caching.high)}; nf4 "
        f"{spanned(nf4.ratio, nf4.low, nf4.high)}."
    )
    assert "Not live, so not a result: graphs." in message.lines


def test_busy_blocks_stand_beside_their_effect() -> None:
    """Of either arm, and of the copy of the baseline."""
    note = "other processes used 98 % of a core on average during the window"
    rows = rows_of("leave_one_out", blocks=12)
    for row in rows:
        if (row["arm"], row["block"]) in (("without nf4", 0), ("without nf4", 3), ("baseline", 3)):
            row["validity.notes"] = [note]
    found = analyse(rows)
    assert found is not None and found.noise is not None
    assert [effect.busy for effect in (*found.effects, found.noise)] == [1, 2, 1, 1]
    headline = ablation.verdict(found, gather(rows)).headline
    assert headline.count(" (1 of 12 blocks busy)") == headline.count(" (2 of 12 blocks busy)") == 1
    assert markdown_text(found).count("| 12 (1 busy) |") == 3
    shown = ablation.section(found, [], [], None)
    assert [row["blocks"] for row in shown["rows"]][1] == "12 (2 busy)"


def test_a_p_value_is_never_nought_and_the_same_everywhere() -> None:
    found = analyse(rows_of("leave_one_out", blocks=12))
    assert found is not None
    small = replace(found, effects=tuple(replace(e, p_holm=0.0004) for e in found.effects))
    shown = ablation.section(small, [], [], None)
    assert shown is not None and {row["p"] for row in shown["rows"][:-1]} == {"< 0.001"}
    assert markdown_text(small).count("| < 0.001 |") == len(NAMES) and "0.000" not in markdown_text(
        small
    )


def test_too_few_blocks_have_no_verdict() -> None:
    rows = rows_of("leave_one_out", blocks=2)
    found = analyse(rows)
    assert found is not None
    conclusion = ablation.verdict(found, gather(rows))
    assert conclusion.headline == (
        f"Too few blocks for any verdict: over 3 optimisations it takes {found.blocks_needed}, "
        "and there are 2."
    )
    assert any(
        line.startswith("Too few blocks for a verdict: prefix caching") for line in conclusion.lines
    )


def test_noise_alone_is_worth_nothing() -> None:
    rows = ablation_rows(Design("add_one_in", {"a": (), "b": ()}), {}, noise=0.01)
    found = analyse(rows)
    assert found is not None
    conclusion = ablation.verdict(found, gather(rows))
    assert conclusion.headline == "No optimisation is shown to change output tokens/s."
    assert any(line.startswith("None: a (found from ") for line in conclusion.lines)


def test_whether_two_multiply_is_said() -> None:
    design = Design("factorial", {"a": (), "b": ()})
    for extra, noise, begin in (
        (0.7, 0.01, "Effects that do not multiply: a with b gives 1."),
        (1.0, 0.004, "Effects that multiply, to within 5 %: a with b gives 1."),
        (1.0, 0.2, "Not told apart, whether effects multiply: a with b gives "),
    ):
        rows = ablation_rows(
            design, {"a": 1.5, "b": 1.2}, blocks=10, noise=noise, together={("a", "b"): extra}
        )
        found = analyse(rows)
        assert found is not None
        (line,) = (
            line for line in ablation.verdict(found, gather(rows)).lines if "multiply" in line
        )
        (pair,) = found.interactions
        assert line.startswith(begin)
        assert f"{spanned(pair.ratio, pair.low, pair.high)} of the product" in line
        assert pair.joint == pytest.approx(1.8 * extra, rel=4 * noise)


def test_factors_of_the_waterfall_multiply_to_the_whole() -> None:
    found = analyse(rows_of("factorial"))
    assert found is not None and found.attribution is not None
    assert math.prod(f.ratio for f in found.attribution.factors) == pytest.approx(
        found.attribution.total
    )
    figures = ablation.AblationStudy().figures(found, ReportInputs([]))
    plots = {one.name: finish(one) for one in figures if one is not None}
    assert set(plots) == {"forest", "waterfall"}
    assert (
        spanned(found.attribution.total, found.attribution.low, found.attribution.high)
        in plots["waterfall"].alt
    )
    assert [item["label"] for item in plots["forest"].legend] == [
        "A/A: the baseline against itself",
        "faster",
        "slower",
        "not live",
    ]


def test_the_page_begins_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of("pairs")
    monkeypatch.setattr("minivllm.report.inputs.read_rows", lambda *_: (rows, []))
    monkeypatch.setattr("minivllm.report.page.figures", lambda inputs: [])
    page = Page(build_report(tmp_path, tmp_path / "out"))
    assert page.text.index("What each optimisation is worth in") < page.text.index(
        "What was measured?"
    )
    assert "prefix caching with nf4" in page.text and "no effect found" not in page.text
    effects = (tmp_path / "out" / "effects.md").read_text().splitlines()
    assert effects[0].startswith("| optimisation | output_tokens_per_s, with / without |")
    assert [line.split(" | ")[0].strip("| ") for line in effects[2:5]] == list(NAMES)
    assert (tmp_path / "out" / "forest.png").exists() and not (
        tmp_path / "out" / "waterfall.png"
    ).exists()


def test_the_copy_of_the_baseline_is_a_row_of_the_table() -> None:
    rows = rows_of("leave_one_out")
    found = analyse(rows)
    assert found is not None and found.noise is not None
    shown = ablation.section(found, gather(rows), [], Path())
    assert shown is not None
    *effects, last = shown["rows"]
    assert [row["name"] for row in effects] == list(NAMES) and last["name"] == "A/A"
    assert (
        last["interval"] == interval(found.noise.low, found.noise.high)
        and last["verdict"] == "none"
    )
    assert [arm for arm, _ in last["arms"]] == ["baseline again", "baseline"]
    # TTFT and ITL
    assert len(last["others"]) == 2 and all(o["text"] != "–" for o in last["others"])


def test_arms_are_linked_to_the_records_of_their_own_sweep(tmp_path: Path) -> None:
    rows = rows_of("leave_one_out")
    earlier = [
        {**row, "sweep": "other", "run_id": f"x{row['run_id']}", "ablation": None} for row in rows
    ]
    analysis, cells = analyse(rows), gather(rows + earlier)
    own = {
        cell.arm: place_of(cell, i, tmp_path)
        for i, cell in enumerate(cells)
        if cell.sweep == "planted"
    }
    found = ablation.section(analysis, cells, [], tmp_path)
    assert found is not None and len({cell.sweep for cell in cells}) == 2
    assert all(own[arm] == place for row in found["rows"] for arm, place in row["arms"])


def test_each_arm_has_a_key_of_its_own() -> None:
    """They are known by their names alone, whatever options differ among them."""
    cells = gather(rows_of("pairs"))
    plot = trade_off(cells, CellStyles(cells))
    assert plot is not None
    assert [item["label"] for item in keys(plot)] == [cell.label for cell in cells]
    assert len({(item["colour"], item["glyph"]) for item in keys(plot)}) == len(cells) == 8


@pytest.mark.parametrize(
    ("kind", "title"),
    [
        ("leave_one_out", "What is each of prefix caching, nf4 and graphs worth in minivllm?"),
        (
            "factorial",
            "What is each of prefix caching, nf4 and graphs worth, alone and together, in "
            "minivllm?",
        ),
    ],
)
def test_the_title_says_whether_all_combinations_were_measured(kind: str, title: str) -> None:
    rows = rows_of(kind)
    assert heading(rows, gather(rows))[0] == title


def test_the_title_of_a_study_is_its_question() -> None:
    rows = rows_of("leave_one_out")
    cells = gather(rows)
    for cell in cells:
        cell.varying = {"batching.max_num_seqs": "4", "cache.block_size": "16"}
    asked = heading(rows, cells, "Which {knobs} are best for {model}?")[0]
    assert asked == "Which max_num_seqs and block_size are best for minivllm?"
    for cell in cells:
        cell.varying = {"first.size": "4", "second.size": "16"}  # alike without their groups
    assert "first.size and second.size" in heading(rows, cells, "Which {knobs}?")[0]


def test_weights_that_most_arms_share_are_told_by_those_that_do_not() -> None:
    rows = rows_of("leave_one_out")
    for row in rows:
        row["memory.weights_16bit"] = 2e9
        row["memory.weights"] = 2e9 if row["arm"] == "without nf4" else 1e9
    conclusion = remarks(gather(rows))
    assert conclusion == [
        "Smallest weights: 1.00 GB, 50.0 % of their 16-bit size (2.00 GB), in all but the arm "
        "without nf4."
    ]
    for row in rows:
        row["memory.weights"] = 1e9 if row["arm"] == "without nf4" else 2e9
    assert remarks(gather(rows))[0].endswith("in the arm without nf4.")
    for row in rows:
        row["memory.weights"] = 2e9 + (row["arm"] == "without nf4")
    assert remarks(gather(rows)) == []  # all of their 16-bit size: nothing was varied


def test_ends_that_say_nothing_are_cut() -> None:
    """The interval of a few blocks that differ much goes on for ever; the axis and the words do
    not."""
    found = analyse(rows_of("factorial"))
    assert found is not None and found.attribution is not None
    wide = replace(found.effects[0], low=1e-9, high=1e21)
    assert spanned(wide.ratio, wide.low, wide.high).endswith("× [<0.001, >1,000]")
    plot = ablation.forest(replace(found, effects=(wide, *found.effects[1:])))
    assert plot is not None and "000,000" not in plot.alt
    assert cut([1e-9, 0.5, 1e21]) == [1e-3, 0.5, 1e3]


def test_other_reports_do_not_pay_for_the_analysis() -> None:
    assert ablation.AblationStudy().find(ReportInputs([{"config.quant": "nf4"}])) is None


def test_a_worse_latency_is_coloured_like_a_worse_throughput() -> None:
    """Optimisation a doubles the throughput, b halves it; latencies go the other way, and c does
    nothing."""
    design = Design("leave_one_out", {"a": (), "b": (), "c": ()})
    found = analyse(ablation_rows(design, {"a": 2.0, "b": 0.5}, blocks=10, seed=2))
    shown = ablation.section(found, [], [], None)
    assert shown is not None
    a, b, c, again = (
        [row["tinge"], *(other["tinge"] for other in row["others"])] for row in shown["rows"]
    )
    assert (a, b) == (["better"] * 3, ["worse"] * 3)  # tokens/s, TTFT, ITL
    assert c == again == [""] * 3
    assert {row["tone"] for row in shown["rows"][2:]} == {"neutral"}
    assert shown["rows"][0]["others"][0]["text"].startswith("0.")
