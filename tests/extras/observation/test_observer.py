"""Bundles against the engine that they tell of. (Machine.check compares the rebuilt state after
every step of every schedule that the tests of the scheduler and the cache draw.)"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from minivllm import LLM, SamplingParams
from minivllm.engine.batching import Continuous
from minivllm.extras.observation.bundle import StepBundle
from minivllm.extras.observation.observer import StepObserver
from minivllm.extras.scheduling.batching import Static
from minivllm.report.view.state import ViewState
from tests.engine.imaginary import make


@pytest.fixture(scope="module")
def tiny() -> Iterator[LLM]:
    with LLM("tiny", overrides=["runtime.device=cpu", "runtime.threads=1"]) as llm:
        yield llm


def test_a_step_says_who_computed_what_and_why() -> None:
    machine = make(Continuous(4, 4), blocks=16)
    bundles = machine.recorded()
    machine.add([1] * 6, 2)
    machine.add([2] * 3, 2)
    machine.run()
    first, *steps = bundles
    assert first["engine"]["block_size"] == 4 and "step" not in first
    assert [one["step"] for one in steps] == list(range(len(steps)))
    assert [(one.get("decoded", []), one.get("scheduled", [])) for one in steps] == [
        ([], [[0, 0, 4, "budget"]]),
        ([], [[0, 4, 2, "prefill"], [1, 0, 2, "budget"]]),
        ([0], [[1, 2, 1, "prefill"]]),
        ([1], []),
    ]
    assert steps[0]["new"] == [
        [0, "0.0", 6, 8, 0, 0.0, None],
        [1, "1.0", 3, 5, 0, 0.0, None],
    ]
    assert steps[0]["held"] == [1, "budget", 0, 15, 0]
    assert steps[1]["admitted"] == [[1, 0, 0, False]]
    assert [state[1:] for state in steps[2]["states"]] == [
        [1, "decode", None],
        [0, "done", "length"],
    ]


def test_held_says_how_many_blocks_are_missing() -> None:
    machine = make(Continuous(4, 64, watermark=0.25), blocks=8)
    bundles = machine.recorded()
    machine.add([1] * 16, 8)
    machine.add([2] * 12, 8)
    machine.step()
    assert bundles[-1]["held"] == [1, "blocks", 3, 4, 2]
    machine.run()
    reasons = {one["held"][1] for one in bundles if "held" in one}
    assert reasons == {"blocks"}


@pytest.mark.parametrize("strategy", ["recompute", "swap"])
def test_a_preemption_says_for_whom(strategy: str) -> None:
    machine = make(Continuous(4, 64, watermark=0, preemption=strategy), blocks=8, host_slots=8)
    bundles = machine.recorded()
    machine.add([1] * 12, 12)
    machine.add([2] * 12, 12)
    machine.run()
    preempted = [one for bundle in bundles for one in bundle.get("preempted", ())]
    assert preempted[0] == [1, 0, strategy == "swap"]
    assert any(bundle.get("loaded") for bundle in bundles) == (strategy == "swap")


def test_others_reasons_to_wait() -> None:
    machine = make(Continuous(1, 64), blocks=16)
    bundles = machine.recorded()
    machine.add([1], 3)
    machine.add([2], 3)
    machine.step()
    assert bundles[-1]["held"][:2] == [1, "seqs"]
    static = make(Static(2, 64), blocks=16)
    bundles = static.recorded()
    static.add([1], 3)
    static.step()
    static.add([2], 3)
    static.step()
    assert bundles[-1]["held"][:2] == [1, "policy"]


def test_prefix_blocks_come_and_go_as_kv_events() -> None:
    machine = make(Continuous(2, 64), blocks=6, prefix_caching=True)
    bundles = machine.recorded()
    machine.add([1] * 9, 2)
    machine.run()
    events = [event for bundle in bundles for event in bundle.get("kv_events", ())]
    (stored,) = events
    assert stored["type"] == "BlockStored" and stored["parent_block_hash"] is None
    assert len(stored["block_hashes"]) == len(stored["blocks"]) == 2
    machine.add([1] * 9, 2)
    machine.step()
    assert bundles[-1]["admitted"][0][2] == 8
    machine.run()
    machine.add([2] * 20, 3)
    machine.run()
    kinds = [event["type"] for bundle in bundles for event in bundle.get("kv_events", ())]
    assert "BlockRemoved" in kinds
    machine.scheduler.cache.reset_prefix_cache()
    machine.observer.flush()
    assert bundles[-1]["kv_events"] == [{"type": "AllBlocksCleared"}]


def test_an_engine_is_joined_and_left_in_the_middle(tiny: LLM) -> None:
    engine, view, bundles = tiny.engine, ViewState(), list[StepBundle]()
    for index in range(3):
        engine.add_request(str(index), [5, 6, 7 + index], SamplingParams(max_tokens=6))
    engine.step()
    observer = StepObserver(
        engine.scheduler, lambda bundle: (bundles.append(bundle), view.apply(bundle))
    )
    assert {one.new.request_id: one.num_tokens for one in view.requests.values()} == {
        "0": 4,
        "1": 4,
        "2": 4,
    }
    engine.abort("1")  # no step follows, but it is told
    assert [one.new.request_id for one in view.requests.values()] == ["0", "2"]
    engine.step()
    assert len(bundles[-1]["timed"]) == 7
    numbers = list(view.requests)
    observer.tell_all()
    assert list(view.requests) == numbers
    observer.close()
    count = len(bundles)
    assert not any(engine.events.listeners.values())
    engine.abort_all()
    assert len(bundles) == count


def test_drafts_say_how_many_were_accepted() -> None:
    knobs = ["speculative=ngram", "speculative.acceptance=1", "speculative.adaptive=false"]
    with LLM("tiny", overrides=[*knobs, "runtime.device=cpu", "runtime.threads=1"]) as llm:
        bundles: list[StepBundle] = []
        observer = StepObserver(llm.engine.scheduler, bundles.append)
        llm.generate([[5, 6, 7, 5, 6, 7, 5, 6]], SamplingParams(max_tokens=12, temperature=0))
        observer.close()
    drafted = [one for bundle in bundles for one in bundle.get("drafts", ())]
    assert drafted and all(one.num_accepted <= one.num_drafts for one in drafted)
    assert sum(one.num_accepted for one in drafted) > 0
