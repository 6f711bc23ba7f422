"""Sentences about bundles, in Python and on the page."""

from __future__ import annotations

from typing import Any

import pytest

from minivllm.engine.batching import Continuous
from minivllm.report.view.words import sentences
from tests.report.view.conftest import Recorded
from tests.report.view.recording import record

TIMES = {"time_s": 1.0, "end_s": 2.0}
ENGINE: Any = {"max_num_seqs": 8, "batching": "continuous"}


@pytest.mark.parametrize(
    ("bundle", "said"),
    [
        (
            {"held": [7, "blocks", 3, 1, 2]},
            ("held", 7, "Request 7 held: needs 3 blocks, 1 free, 2 kept free."),
        ),
        (
            {"held": [7, "seqs", 0, 1, 2]},
            ("held", 7, "Request 7 held: 8 requests run, the most allowed."),
        ),
        (
            {"preempted": [[4, 2, True]]},
            ("preempted", 4, "Request 4 preempted for request 2: its blocks go to host memory."),
        ),
        (
            {"preempted": [[4, 4, False]]},
            ("preempted", 4, "Request 4 preempted: it has no block to grow into."),
        ),
        (
            {"states": [[0.0, 4, "preempted", None]]},
            ("preempted", 4, "Request 4 starts again."),
        ),
        (
            {"admitted": [[1, 0, 16, False]]},
            ("queue", 1, "Request 1 leaves the queue: 16 tokens found in the prefix cache."),
        ),
        (
            {"new": [[5, "5.1", 9, 12, 0, 0.0, 4]]},
            ("queue", 5, "Request 5 starts on the blocks of request 4."),
        ),
        (
            {"scheduled": [[1, 0, 8, "share"]]},
            ("prefill", 1, "Request 1 computes 8 tokens from 0 on, its share of the budget."),
        ),
        ({"drafts": [[1, 3, 1]]}, ("drafts", 1, "Request 1: 1 of 3 drafts accepted.")),
        (
            {"kv_events": [{"type": "BlockRemoved", "blocks": [1]}]},
            ("cache", None, "Out of the prefix cache: 1 block."),
        ),
        (
            {"kv_events": [{"type": "AllBlocksCleared"}]},
            ("cache", None, "The prefix cache is emptied."),
        ),
        ({"saved": [[1, 2], [3, 4]]}, ("cache", None, "Saved to host memory: 2 blocks.")),
        ({"read": 1}, ("cache", None, "Read from the disk: 1 block.")),
        (
            {"states": [[0.0, 4, "done", "shed"]]},
            ("done", 4, "Request 4 is done: its deadline could not be met."),
        ),
    ],
)
def test_a_bundle_is_told_in_a_sentence(bundle: dict[str, Any], said: tuple[Any, ...]) -> None:
    assert [one[:3] for one in sentences({**TIMES, **bundle}, ENGINE)] == [said]


def test_each_event_has_the_time_at_which_it_happened() -> None:
    """A request that arrives while the step before is computed, and ends with this one."""
    bundle = {
        **TIMES,
        "step": 3,
        "new": [[4, "r4", 9, 12, 0, 0.5, None], [5, "r4.1", 9, 12, 0, 0.5, 4]],
        "states": [[0.9, 4, "waiting", None], [0.95, 4, "prefill", None], [1.9, 4, "done", "stop"]],
        "admitted": [[4, 0, 0, False]],
        "preempted": [[6, 4, False]],
        "scheduled": [[4, 0, 9, "prefill"]],
        "drafts": [[2, 3, 1]],
        "kv_events": [
            {"type": "BlockRemoved", "blocks": [1]},
            {"type": "BlockStored", "blocks": [1]},
        ],
    }
    times = {one.text.split(":")[0]: one.time_s for one in sentences(bundle, ENGINE)}
    assert times == {
        "Step 3 computes 9 tokens for 1 request.": 1.0,
        "Request 6 preempted for request 4": 1.0,
        "Request 4 arrives": 0.5,
        "Request 5 starts on the blocks of request 4.": 2.0,
        "Request 4 leaves the queue.": 0.95,
        "Request 4 computes 9 tokens from 0 on, then decodes.": 1.0,
        "Request 2": 2.0,
        "Into the prefix cache": 2.0,
        "Out of the prefix cache": 1.0,
        "Request 4 is done": 1.9,
    }


def test_a_step_begins_with_what_it_computes() -> None:
    bundle = {**TIMES, "step": 3, "decoded": [1], "scheduled": [[2, 0, 5, "prefill"]]}
    assert [one.text for one in sentences(bundle, ENGINE)] == [
        "Step 3 computes 6 tokens for 2 requests.",
        "Request 2 computes 5 tokens from 0 on, then decodes.",
        "Decode: 1 token for 1 request.",
    ]
    assert sentences({**TIMES, "step": 4}, ENGINE)[0].text == "Step 4 computes nothing."


@pytest.mark.parametrize("strategy", ["recompute", "swap"])
def test_the_page_says_the_same(recorded: Recorded, strategy: str) -> None:
    policy = Continuous(6, 32, watermark=0, preemption=strategy, fair_prefill=True)
    items = record(policy, blocks=40, host_slots=60, offload_slots=8, seed=1)
    bundles = [item for item in items if "gauges" not in item]
    engine = bundles[0]["engine"]
    python = [[list(one) for one in sentences(bundle, engine)] for bundle in bundles]
    script = "([bundles, engine]) => bundles.map((one) => minivllmView.sentences(one, engine))"
    assert recorded.page.evaluate(script, [bundles, engine]) == python
    kinds = {said[0] for one in python for said in one}
    assert kinds >= {"step", "held", "preempted", "queue", "prefill", "decode", "cache", "done"}
