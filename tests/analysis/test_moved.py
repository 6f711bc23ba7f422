"""Counters of a group that nobody set are named where they change."""

from __future__ import annotations

from typing import Any

import pytest

from minivllm.analysis.cells import gather
from minivllm.analysis.moved import changed_weights, moved, sentences
from minivllm.analysis.rows import Row


def cell(arm: str, config: dict[str, Any], *blocks: dict[str, Any]) -> list[Row]:
    """A cell's rows, one a block with its counters ("group.name")."""
    return [
        {
            "cell_id": arm,
            "arm": arm,
            "sweep": "s",
            "block": i,
            "status": "ok",
            "metrics.output_tokens_per_s": 10.0,
            "config.arrival._target_": "minivllm.bench.workloads.arrivals.Offline",
            "config.cache.prefix_caching": False,
            "config.quant.dtype": "bfloat16",
            "config.batching.max_num_seqs": 8,
            **config,
            **{f"liveness.{name}": value for name, value in counters.items()},
        }
        for i, counters in enumerate(blocks)
    ]


ON = {"config.cache.prefix_caching": True}
EIGHT, ONE = {"batching.largest_batch": 8.0}, {"batching.largest_batch": 1.0}


def named(first: list[Row], second: list[Row]) -> list[str]:
    return [one.counter for one in moved(gather([*first, *second]))]


def test_a_knob_that_turns_another_is_named() -> None:
    rows = [*cell("base", {}, EIGHT, EIGHT), *cell("on", ON, ONE, ONE)]
    (line,) = sentences(gather(rows))
    assert line.startswith(
        "Moved although nobody set it: batching.largest_batch is 1 against 8 in "
    ) and line.endswith("not the effect of its own knobs alone.")
    larger = {**ON, "config.cache.num_blocks": 9}
    (line,) = sentences(gather([*rows, *cell("more", larger, ONE, ONE)]))
    assert "batching.largest_batch is 1 against 8 in 2 cells; what differs" in line


@pytest.mark.parametrize(
    ("config", "base", "other", "expected"),
    [
        (ON, EIGHT, {"batching.largest_batch": 6.0}, []),  # as time has it
        ({"config.batching.max_num_seqs": 1}, EIGHT, ONE, []),  # somebody set it
        (ON, {"attention.kernel": "cpu"}, {"attention.kernel": "eager"}, ["attention.kernel"]),
        (ON, {"quant.dtype": "bfloat16"}, {"quant.dtype": "bfloat16"}, []),
        (ON, {"speculative.drafts": 0.0}, {"speculative.drafts": 5.0}, ["speculative.drafts"]),
        (ON, EIGHT, {}, []),  # not counted
        ({"config.engine._target_": "other"}, EIGHT, ONE, []),  # another engine
        ({"config.workload.num_requests": 1}, EIGHT, ONE, []),  # another load
        ({}, EIGHT, ONE, []),  # nothing was set
        ({**ON, "config.arrival.rate": 3.0}, EIGHT, ONE, []),
    ],
)
def test_what_counts_as_moved(
    config: dict[str, Any], base: dict[str, Any], other: dict[str, Any], expected: list[str]
) -> None:
    assert named(cell("base", {}, base), cell("other", config, other)) == expected


def test_weights_that_changed_between_blocks_are_named() -> None:
    rows = cell("base", {}, EIGHT, EIGHT, EIGHT)
    for row, digest in zip(rows, ("a", "a", None), strict=True):  # an older record lacks it
        row["provenance.weights_digest"] = digest
    assert changed_weights(gather(rows)) == []
    rows[1]["provenance.weights_digest"] = "b"
    (line,) = changed_weights(gather(rows))
    assert line.startswith("The weights changed between blocks of ")


def test_every_block_must_say_so() -> None:
    assert named(cell("base", {}, EIGHT, ONE), cell("on", ON, ONE, ONE)) == []
    paced = {"config.arrival._target_": "minivllm.bench.workloads.arrivals.Poisson"}
    assert named(cell("base", paced, EIGHT), cell("on", ON | paced, ONE)) == []
    assert moved([]) == []
