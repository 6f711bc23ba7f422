"""From records to verdicts: planted effects are found, and nothing else is."""

from __future__ import annotations

import math

import pytest

from minivllm.analysis.ablation.design import Design, Kind
from minivllm.analysis.ablation.effects import analyse
from minivllm.analysis.ablation.findings import Analysis, Effect
from minivllm.analysis.rows import Row
from tests.experiments.synthetic import ablation_rows

SIX = {"a": (), "b": ("a",), "c": (), "d": ("a",), "e": (), "f": ()}
KINDS: tuple[Kind, ...] = ("leave_one_out", "add_one_in", "pairs", "factorial")


def analysed(rows: list[dict[str, object]]) -> Analysis:
    found = analyse(rows)
    assert found is not None
    return found


def by_name(effects: tuple[Effect, ...]) -> dict[str, Effect]:
    return {effect.name: effect for effect in effects}


@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_slowdown_is_found_and_attributed(kind: Kind) -> None:
    found = analysed(ablation_rows(Design(kind, SIX), {"d": 0.9}))
    effects = by_name(found.effects)
    assert {name: effect.verdict for name, effect in effects.items()} == {
        **dict.fromkeys(SIX, "none"),
        "d": "slower",
    }
    slow = effects["d"]
    assert slow.low is not None and slow.high is not None and slow.low <= 0.9 <= slow.high
    assert slow.p_holm is not None and slow.p_holm <= 0.05 and slow.blocks == 8
    assert found.noise is not None and found.noise.verdict == "none"
    assert found.blocks_needed == found.blocks == 8


def test_every_effect_is_of_one_optimisation_alone() -> None:
    """Leaving `a` out leaves out what requires it; the arm that it is compared with lacks that as
    well."""
    found = by_name(
        analysed(ablation_rows(Design("leave_one_out", SIX), {"a": 1.5, "b": 2.0})).effects
    )
    assert (found["a"].arm, found["a"].against) == ("without b+d", "without a+b+d")
    assert (found["b"].arm, found["b"].against) == ("baseline", "without b")
    assert found["a"].ratio == pytest.approx(1.5, rel=0.02)
    assert found["b"].ratio == pytest.approx(2.0, rel=0.02)


def test_further_metrics_have_their_own_direction() -> None:
    found = analysed(ablation_rows(Design("add_one_in", SIX), {"c": 1.25}))
    others = {(effect.metric, effect.name): effect for effect in found.others}
    assert {metric for metric, _ in others} == {"ttft_ms.p50", "itl_ms.p50"}
    ttft = others["ttft_ms.p50", "c"]
    assert ttft.verdict == "faster" and ttft.ratio == pytest.approx(0.8, rel=0.02)


def test_a_knob_that_does_nothing_is_not_live() -> None:
    found = analysed(ablation_rows(Design("leave_one_out", SIX), {"c": 0.9, "e": 1.2}, idle=["e"]))
    effects = by_name(found.effects)
    assert effects["e"].verdict == "not live" and effects["c"].verdict == "slower"
    assert any(note.startswith("e did no work") for note in found.notes)


def test_a_knob_that_changes_no_setting_is_not_live() -> None:
    rows = ablation_rows(Design("add_one_in", {"a": ()}), {})
    for row in rows:
        row["cell_id"] = "same"
    assert analysed(rows).effects[0].verdict == "not live"


def test_failed_arms_are_told_from_slow_ones() -> None:
    rows = ablation_rows(Design("leave_one_out", SIX), {"c": 0.9})
    for row in rows:
        if row["arm"] == "without c":
            row["status"] = "oom"
    found = analysed(rows)
    failed = by_name(found.effects)["c"]
    assert failed.verdict == "failed" and failed.ratio is None and failed.blocks == 0
    assert any("8 measurements did not end well" in note for note in found.notes)


def test_blocks_without_a_figure_are_counted_arm_by_arm() -> None:
    rows = ablation_rows(Design("leave_one_out", SIX), {"c": 0.9}, blocks=10)
    by = {(row["arm"], row["block"]): row for row in rows}
    by["without c", 0]["metrics.output_tokens_per_s"] = None
    by["without c", 1]["metrics.output_tokens_per_s"] = math.nan
    by["without c", 2]["status"] = "oom"
    by["without e", 0]["metrics.output_tokens_per_s"] = -1.0
    by["without f", 0]["validity.ok"] = False
    found = analysed(rows)
    gaps = {one.arm: one for one in found.gaps}
    assert gaps["without c"].why == {"no figure": 2, "oom": 1} and gaps["without c"].blocks == 10
    assert gaps["without e"].why == {"negative": 1} and gaps["without f"].why == {"invalid": 1}
    assert (
        by_name(found.effects)["c"].blocks == 7 and by_name(found.effects)["e"].verdict == "failed"
    )
    notes = " ".join(found.notes)
    assert "without c: no output_tokens_per_s in 2 of 10 blocks" in notes
    assert "without e: output_tokens_per_s is negative in 1 block" in notes
    assert "2 measurements did not end well (without c: 1 oom; without f: 1 invalid)" in notes


def test_an_arm_that_is_still_to_be_measured_has_not_failed() -> None:
    rows = ablation_rows(Design("pairs", SIX), {"c": 0.9}, blocks=10)
    partial = [row for row in rows if row["arm"] not in ("with c", "with e+f")]
    found = analysed(partial)
    assert by_name(found.effects)["c"].verdict == "not measured"
    assert {
        one.verdict
        for one in found.interactions
        if (one.first, one.second) in (("c", "e"), ("c", "f"))
    } == {"not measured"}
    (pair,) = (one for one in found.interactions if (one.first, one.second) == ("e", "f"))
    assert pair.verdict == "not measured"
    for row in rows:
        if row["arm"] == "with c":
            row["status"] = "oom"
    assert by_name(analysed(rows).effects)["c"].verdict == "failed"


def test_none_says_why_where_the_figures_seem_to_deny_it() -> None:
    rows = ablation_rows(Design("add_one_in", SIX), {"c": 1.02}, noise=0.002, blocks=9)
    assert by_name(analysed(rows).effects)["c"].reason == ""
    small = analysed(ablation_rows(Design("add_one_in", SIX), {"c": 1.004}, noise=1e-4, blocks=9))
    effect = by_name(small.effects)["c"]
    assert (effect.verdict, effect.reason) == ("none", "found, but of less than 0.5 %")
    for row in rows:
        if row["arm"] == "baseline again":
            row["metrics.output_tokens_per_s"] *= 1.06
    within = by_name(analysed(rows).effects)["c"]
    assert within.verdict == "none" and "no more than the A/A arm differs" in within.reason
    assert f"c is none: {within.reason}." in analysed(rows).notes
    few = ablation_rows(Design("add_one_in", SIX), {}, noise=1e-5, blocks=9)
    for row in few:
        # of the nine ranks the second is of the other sign: p is 6 / 512
        if row["arm"] == "with c":
            row["metrics.output_tokens_per_s"] *= math.exp(
                0.01 * (row["block"] + 1) * (-1) ** (row["block"] == 1)
            )
    effect = by_name(analysed(few).effects)["c"]
    assert effect.verdict == "none" and effect.low is not None and effect.low > 1
    assert (
        effect.reason
        == "p is 0.012 by itself and 0.070 as one of 6 tests (Holm); the interval is for it alone"
    )


def test_a_spike_is_told_with_the_range() -> None:
    rows = ablation_rows(Design("add_one_in", SIX), {"c": 1.2}, blocks=9)
    for row in rows:
        if (row["arm"], row["block"]) == ("with c", 4):
            row["metrics.output_tokens_per_s"] *= 0.3
    found = analysed(rows)
    effect = by_name(found.effects)["c"]
    assert effect.spikes == 1 and effect.ratio == pytest.approx(1.2, rel=0.02)
    (note,) = (note for note in found.notes if "far from the others" in note)
    assert note.startswith("c: 1 of 9 blocks lies") and "not robust to one spike" in note


def test_a_failed_block_costs_only_that_block() -> None:
    rows = ablation_rows(Design("leave_one_out", SIX), {"c": 0.9}, blocks=9)
    rows = [row for row in rows if (row["arm"], row["block"]) != ("without c", 3)]
    effects = by_name(analysed(rows).effects)
    assert effects["c"].blocks == 8 and effects["a"].blocks == 9


def test_an_arm_with_blocks_of_zero_is_not_judged_by_the_others() -> None:
    rows = ablation_rows(Design("add_one_in", {"a": (), "b": ()}), {"a": 1.2, "b": 0.9})
    for row in rows:
        if row["arm"] == "with a" and row["block"] % 2:
            row["metrics.output_tokens_per_s"] = 0.0
    found = analysed(rows)
    assert {name: e.verdict for name, e in by_name(found.effects).items()} == {
        "a": "failed",
        "b": "slower",
    }
    assert any("output_tokens_per_s is 0 in 4 blocks" in note for note in found.notes)


def test_too_few_blocks_say_how_many_are_needed() -> None:
    found = analysed(ablation_rows(Design("leave_one_out", SIX), {"c": 0.5}, blocks=7))
    assert {effect.verdict for effect in found.effects} == {"too few blocks"}
    assert "6 optimisations needs 8 blocks" in found.notes[0]


def test_an_effect_within_the_noise_of_the_copy_is_none() -> None:
    """Significant by itself, but the A/A arm differs from the baseline by more."""
    rows = ablation_rows(Design("add_one_in", SIX), {"c": 1.01}, noise=1e-5)
    before = by_name(analysed(rows).effects)["c"]
    assert before.verdict == "faster"
    for row in rows:
        if row["arm"] == "baseline again":
            row["metrics.output_tokens_per_s"] *= 0.98
    after = by_name(analysed(rows).effects)["c"]
    assert after.ratio == before.ratio and after.p_holm == before.p_holm and after.verdict == "none"


def test_a_copy_that_differs_is_said() -> None:
    rows = ablation_rows(Design("add_one_in", SIX), {})
    for row in rows:
        if row["arm"] == "baseline again":
            row["metrics.output_tokens_per_s"] *= 0.9
    found = analysed(rows)
    assert found.noise is not None and found.noise.verdict == "slower"
    assert any("The A/A arm differs" in note for note in found.notes)


def test_interactions() -> None:
    design, effects, together = Design("pairs", SIX), {"c": 1.3, "e": 1.2}, {("c", "e"): 0.8}
    found = analysed(ablation_rows(design, effects, blocks=10, together=together))
    pairs = {(pair.first, pair.second): pair for pair in found.interactions}
    assert ("a", "b") not in pairs and ("b", "d") in pairs  # b requires a: it never stands alone
    assert pairs["c", "e"].verdict == "less together"
    assert pairs["c", "e"].ratio == pytest.approx(0.8, rel=0.03)
    assert {pair.verdict for two, pair in pairs.items() if two != ("c", "e")} == {"none"}
    few = analysed(ablation_rows(design, effects, blocks=8, together=together))
    assert {pair.verdict for pair in few.interactions} == {"too few blocks"}
    assert [note for note in few.notes if "13 interactions needs 10 blocks" in note] == list(
        few.notes
    )


def test_factors_multiply_to_the_total() -> None:
    design = Design("factorial", SIX)
    rows = ablation_rows(
        design, {"a": 1.5, "b": 1.2, "e": 0.9}, together={("a", "c"): 1.1, ("c", "e"): 1.3}
    )
    attribution = analysed(rows).attribution
    assert attribution is not None and attribution.blocks == 8
    assert math.prod(f.ratio for f in attribution.factors) == pytest.approx(
        attribution.total, rel=1e-9
    )
    assert attribution.total == pytest.approx(1.5 * 1.2 * 0.9 * 1.1 * 1.3, rel=0.03)
    factors = {factor.name: factor.ratio for factor in attribution.factors}
    assert factors["b"] == pytest.approx(1.2, rel=0.02)
    # half of each that it has a part in
    assert factors["c"] == pytest.approx(math.sqrt(1.1 * 1.3), rel=0.05)


def test_records_of_older_code_are_left_out() -> None:
    design = Design("leave_one_out", SIX)
    old = ablation_rows(design, {"c": 0.5})
    for row in old:
        row["provenance.code_hash"] = "old"
        row["provenance.started_at"] = "2024" + row["provenance.started_at"][4:]
    found = analysed(old + ablation_rows(design, {"c": 0.9}))
    assert by_name(found.effects)["c"].ratio == pytest.approx(0.9, rel=0.02)
    assert any(f"{len(old)} records" in note for note in found.notes)


def test_arms_that_were_measured_at_other_times_give_no_verdict() -> None:
    """An arm that failed and was tried again on another day, or one that was added: the drift of a
    day is no effect."""
    design = Design("leave_one_out", SIX)
    rows = ablation_rows(design, {"c": 0.5})
    for row in rows:
        if row["arm"] == "without b":
            row["provenance.started_at"] = row["provenance.started_at"].replace(
                "2025-01-01", "2025-01-02"
            )
            row["metrics.output_tokens_per_s"] *= 0.8
    found = analysed(rows)
    effects = by_name(found.effects)
    assert effects["b"].verdict == "apart" and effects["c"].verdict == "slower"
    assert [
        name for name in SIX if any(note.startswith(f"{name}: one arm") for note in found.notes)
    ] == ["b"]


def earlier(rows: list[Row]) -> list[Row]:
    for row in rows:
        row["provenance.started_at"] = "2024" + row["provenance.started_at"][4:]
    return rows


def test_records_of_another_design_are_left_out() -> None:
    """Both have a baseline and its copy, which are all of them here and none of them there."""
    old = earlier(ablation_rows(Design("leave_one_out", SIX), {"c": 0.5}))
    new = ablation_rows(Design("add_one_in", SIX), {"c": 0.9})
    found = analysed(old + new)
    assert found.design == "add_one_in"
    assert found.effects == analysed(new).effects and found.noise == analysed(new).noise
    assert any(f"{len(old)} records of other ablations" in note for note in found.notes)


def test_of_a_block_that_was_measured_again_the_newest_counts() -> None:
    """With a trace, say: another run_id, and all else alike."""
    design = Design("leave_one_out", SIX)
    old = earlier(ablation_rows(design, {"c": 0.5}))
    for row in old:
        row["run_id"] = f"z{row['run_id']}"
    new = ablation_rows(design, {"c": 0.9})
    found = analysed(old + new)
    assert found.effects == analysed(new).effects and found.blocks == 8
    assert any(
        f"{len(old)} records of other" in note and "measured again" in note for note in found.notes
    )


def test_the_newest_record_says_what_is_analysed() -> None:
    """A sweep of the same name with one optimisation more and another metric; the arms that were
    there are reused."""
    few = earlier(ablation_rows(Design("add_one_in", {"c": ()}), {"c": 0.9}, seed=1))
    more = ablation_rows(Design("add_one_in", {"c": (), "e": ()}), {"c": 0.9, "e": 1.2}, seed=1)
    for row in (more := [row for row in more if row["arm"] == "with e"]):
        row["ablation.metric"] = "ttft_ms.p50"
    found = analysed(few + more)
    assert found.metric == "ttft_ms.p50"
    verdicts = {name: effect.verdict for name, effect in by_name(found.effects).items()}
    assert (
        verdicts["c"] == "slower"
        and set(verdicts) == {"c", "e"}
        and by_name(found.effects)["e"].blocks == 8
    )


def test_what_a_sweep_has_planned_counts_whatever_its_records_were_made_for() -> None:
    rows = ablation_rows(Design("pairs", SIX), {"c": 0.9})
    of = {"metric": "ttft_ms.p50", "design": "add_one_in", "optimisations": ["see"], "requires": {}}
    arms = {"baseline": [], "baseline again": [], "with c": ["see"]}
    planned = {row["run_id"]: {**of, "on": arms[row["arm"]]} for row in rows if row["arm"] in arms}
    for row in rows:
        if row["arm"] == "with c":
            row["arm"] = "with see"
    found = analyse(rows, planned)
    assert found is not None and (found.design, found.metric) == ("add_one_in", "ttft_ms.p50")
    (effect,) = found.effects
    assert (effect.name, effect.verdict, found.blocks_needed) == ("see", "slower", 6)
    assert analyse(rows, {}) is None


def test_blocks_pair_within_a_host() -> None:
    rows = ablation_rows(Design("leave_one_out", SIX), {"c": 0.9})
    for row in rows:
        if row["arm"] == "without c" and row["block"] == 0:
            row["provenance.host"] = "there"
    assert by_name(analysed(rows).effects)["c"].blocks == 7


def test_records_of_plain_sweeps_are_no_ablation() -> None:
    rows = ablation_rows(Design("leave_one_out", SIX), {}, ablation=None)
    assert analyse(rows) is None
