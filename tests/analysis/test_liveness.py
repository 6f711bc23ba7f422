"""Which counters speak for which knob."""

from __future__ import annotations

import copy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from minivllm.analysis.cells import gather
from minivllm.analysis.format import show
from minivllm.analysis.liveness import DECISIVE, LIVE_GROUPS, UNCOUNTED, liveness
from minivllm.analysis.rows import read_rows
from minivllm.config.options import RuntimeOptions
from minivllm.engine.options import SamplingParams
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
