"""Which counters speak for which knob."""

from __future__ import annotations

import copy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from minivllm.analysis.ablation.design import AGAIN
from minivllm.analysis.cell import Cell
from minivllm.analysis.cells import gather
from minivllm.analysis.format import show
from minivllm.analysis.liveness import (
    DECISIVE,
    LIVE_GROUPS,
    UNCOUNTED,
    liveness,
    undistinguished,
)
from minivllm.analysis.rows import read_rows
from minivllm.bench.records.measurement import SIMULATED
from minivllm.config.options import RuntimeOptions
from minivllm.engine.options import SamplingParams
from minivllm.report.sections import liveness as below
from minivllm.report.verdict import verdict as conclude
from tests.report.synthetic import make_record, write


def judged(folder: Path, knob: str, value: Any, **counters: Any) -> str:
    """The verdict on a knob where these counters ("group.name") are another's than the
    baseline's."""
    group, _, name = knob.partition(".")
    base = make_record("int8")
    base.liveness = {
        "runtime": {"rows_trimmed": 0.0},
        "decoding": {"tokens_drawn": 4.0},
        "batching": {"forks": 0.0},
        "speculative": {"drafts": 0.0, "accepted_tokens": 0.0},
    }
    base.liveness |= {
        "attention": {"kernel": "cpu", "launches": 3.0},
        "quant": {"kernels": "PanelLinear 4"},
    }
    other = copy.deepcopy(base)
    other.run_id, other.cell_id, other.arm = "other", "other", "other"
    other.config = {**base.config, group: {**base.config.get(group, {}), name: value}}
    for path, count in counters.items():
        where, _, what = path.partition("__")
        other.liveness[where][what] = count
    write(folder, [base, other], parquet=False)
    cells = sorted(gather(read_rows(folder)[0]), key=lambda cell: cell.arm == "other")
    (found,) = liveness(cells)
    assert found.option == f"{knob}={show(value)}"
    return found.verdict


def test_a_live_knob_shows_what_moved(tmp_path: Path) -> None:
    base, other = make_record("int8"), make_record("nf4")
    base.liveness = {"quant": {"layers_quantised": 196, "format": "int8", "kernels": "same"}}
    other.liveness = {
        "quant": {"layers_quantised": 196, "format": "nf4", "kernels": "same", "more": 1.0}
    }
    write(tmp_path, [base, other], parquet=False)
    (found,) = liveness(gather(read_rows(tmp_path)[0]))
    assert (found.counters, found.baseline) == ("format nf4, more 1", "format int8")


@pytest.mark.parametrize(
    ("knob", "value", "counters", "verdict"),
    [
        ("runtime.trim_last_layer", True, {"runtime__rows_trimmed": 9.0}, "live"),
        ("runtime.trim_last_layer", True, {"batching__forks": 9.0}, "not live"),
        ("runtime.linear_kernel", "triton", {"quant__kernels": "TritonLinear 4"}, "live"),
        ("runtime.linear_kernel", "triton", {}, "not live"),
        ("decoding.beam_width", 4, {"batching__forks": 7.0}, "live"),
        ("runtime.threads", 1, {}, "not counted"),
        ("runtime.determinism", "run", {}, "not counted"),
        ("attention.split_size", 128, {}, "not counted"),
        ("runtime.threads", 1, {"runtime__rows_trimmed": 9.0}, "not counted"),
        ("decoding.deadline_ms", 5.0, {"batching__requests_shed": 3.0}, "live"),
        ("decoding.top_k", 5, {}, "not live"),
        ("speculative.prompt_lookup_max", 3, {}, "not live"),
        ("speculative.prompt_lookup_max", 3, {"speculative__drafts": 8.0}, "live"),
        ("cache.of_a_plug_in", 1, {}, "not counted"),
    ],
)
def test_the_verdict_on_a_knob(
    knob: str, value: Any, counters: dict[str, Any], verdict: str, tmp_path: Path
) -> None:
    assert judged(tmp_path, knob, value, **counters) == verdict


def test_every_knob_of_the_runtime_is_judged_by_its_own_counters_or_by_none() -> None:
    named = {
        name.removeprefix("runtime.")
        for name in DECISIVE.keys() | UNCOUNTED
        if name.startswith("runtime.")
    }
    assert named == {field.name for field in fields(RuntimeOptions)}
    assert not DECISIVE.keys() & UNCOUNTED
    decoding = {field.name for field in fields(SamplingParams)}
    for name in DECISIVE.keys() | UNCOUNTED:
        group, _, knob = name.partition(".")
        assert group in LIVE_GROUPS and (group != "decoding" or knob in decoding), name


def cells_of(folder: Path, *settings: dict[str, Any], engine: str = "my.Engine") -> list[Cell]:
    """Cells of one engine, each with these knobs ("group.name"); counters are "group__name", an
    `arm` is its own name."""
    records = []
    for number, setting in enumerate(settings):
        record = make_record("int8")
        record.run_id = record.cell_id = record.arm = str(setting.get("arm", number))
        record.position = number
        record.liveness = {"batching": {"largest_batch": 4.0}, "attention": {"kernel": "sdpa"}}
        record.config = copy.deepcopy(record.config) | {"engine": {"_target_": engine}}
        for key, value in setting.items():
            group, mark, name = key.partition("." if "." in key else "__")
            if key != "arm":
                place = record.config if mark == "." else record.liveness
                place.setdefault(group, {})[name] = value
        records.append(record)
    write(folder, records, parquet=False)
    return sorted(gather(read_rows(folder)[0]), key=lambda cell: cell.rows[0]["position"])


@pytest.mark.parametrize(
    ("counters", "verdict"),
    [(({}, {}), "not counted"), (({"engine__turbos": 0.0}, {"engine__turbos": 9.0}), "live")],
    ids=["without a counter", "with one"],
)
def test_a_knob_of_a_users_engine_shows_its_work_or_is_not_counted(
    tmp_path: Path, counters: tuple[dict[str, float], dict[str, float]], verdict: str
) -> None:
    off, on = counters
    cells = cells_of(tmp_path, {"engine.turbo": False, **off}, {"engine.turbo": True, **on})
    (found,) = liveness(cells)
    assert (found.option, found.verdict) == ("engine.turbo=true", verdict)
    lines = " ".join(conclude(cells).lines)
    assert ("Not counted: engine.turbo=true in" in lines) == (verdict == "not counted")


def test_what_a_simulation_goes_by_is_no_knob_that_counts(tmp_path: Path) -> None:
    settings = {"engine.tflops": 1.0}, {"engine.tflops": 2.0}
    assert liveness(cells_of(tmp_path, *settings, engine=SIMULATED)) == []


def test_arms_with_one_effective_configuration_are_named(tmp_path: Path) -> None:
    """Two backends that are one where they ran, and two arms that set the same."""
    eager = {"attention.name": "eager", "attention__kernel": "eager"}
    cells = cells_of(
        tmp_path,
        eager,
        {"attention.name": "auto"},
        {"attention.name": "sdpa"},
        {**eager, "arm": "x"},
    )
    groups = [[cell.label for cell in group] for group in undistinguished(cells)]
    assert groups == [["name=eager (0)", "name=eager (x)"], ["name=auto", "name=sdpa"]]
    assert (
        "No counter tells name=auto and name=sdpa apart: they may have run as one configuration."
        in conclude(cells).lines
    )


def test_many_groups_of_one_configuration_are_counted_and_listed_below(tmp_path: Path) -> None:
    threads = ({"runtime.threads": count} for count in (1, 2, 3))
    both = [{**one, "attention.name": name} for one in threads for name in ("auto", "sdpa")]
    base = {"attention.name": "eager", "attention__kernel": "eager", "runtime.threads": 9}
    cells = cells_of(tmp_path, base, *both)
    lines = [line for line in conclude(cells).lines if "counter tells" in line]
    assert lines == [
        "3 groups of cells may each have run as one configuration: no counter tells theirs apart."
    ]
    section = below(cells, liveness(cells))
    assert section is not None and section["indistinct"][0].startswith("No counter tells ")
    assert len(section["indistinct"]) == 3


@pytest.mark.parametrize(
    "other",
    [
        {"attention.name": "auto", "attention__kernel": "triton"},  # its counters say so
        {"attention.name": "auto", "workload.input_len": 9},  # other work
        {"attention.name": "auto", "runtime.threads": 9},  # which no counter shows
        {"attention.name": "auto", "quant.group_size": 9},  # whose counters are sizes
    ],
)
def test_arms_that_ran_otherwise_are_not(tmp_path: Path, other: dict[str, Any]) -> None:
    eager = {"attention.name": "eager", "attention__kernel": "eager"}
    assert undistinguished(cells_of(tmp_path, eager, {"attention.name": "sdpa"}, other)) == []


def test_static_batches_are_not_dead_where_they_count_as_much(tmp_path: Path) -> None:
    """Requests that wait until a batch has ended are in no counter."""
    policies = ({"choices.batching": name} for name in ("continuous", "static", "sequential"))
    cells = cells_of(tmp_path, *policies)
    verdicts = {found.option: found.verdict for found in liveness(cells)}
    assert verdicts == {"batching=static": "not counted", "batching=sequential": "not live"}
    assert undistinguished(cells) == []
    from_static = cells_of(tmp_path / "2", {"choices.batching": "static"}, {"arm": "x"})
    assert [found.verdict for found in liveness(from_static)] == ["not counted"]


def test_the_copy_of_an_ablations_baseline_is_meant_to_be_the_same(tmp_path: Path) -> None:
    assert undistinguished(cells_of(tmp_path, {"arm": "baseline"}, {"arm": AGAIN})) == []
