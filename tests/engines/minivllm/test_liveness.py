"""What passes report, under the names that records have."""

from __future__ import annotations

from minivllm.engines.minivllm.liveness import pass_counters
from minivllm.passes.base import PassReport

OWN = {"fuse", "grouped", "native", "compile", "trim"}


def test_a_dense_model_on_which_nothing_was_done() -> None:
    assert pass_counters([PassReport("trim", 1)], OWN, False) == dict.fromkeys(
        ("modules_fused", "native_layers", "compiled", "compiled_graphs"), 0.0
    )


def test_experts_that_were_fused_and_then_grouped_are_modules_no_more() -> None:
    grouped = PassReport("grouped", 2, counters={"experts": 8})
    assert pass_counters([PassReport("fuse", 21), grouped], OWN, True)["modules_fused"] == 13.0
    counters = pass_counters([grouped], OWN, True)
    assert (counters["modules_fused"], counters["mixtures_grouped"]) == (0.0, 2.0)


def test_graphs_that_are_compiled_later_count_too() -> None:
    counts = {"graphs": 2}
    reports = [PassReport("compile", 8, seconds=3.0, counters=counts)]
    counts["graphs"] = 3
    counters = pass_counters(reports, OWN, False)
    assert (counters["compiled"], counters["compiled_graphs"]) == (8.0, 3.0)
