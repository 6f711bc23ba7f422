"""Requests that cannot meet their deadline end early, and cost nothing."""

from __future__ import annotations

from minivllm.engine.batching import Continuous
from tests.engine.imaginary import make


def test_a_request_that_cannot_meet_its_deadline_is_shed() -> None:
    machine = make(Continuous(max_num_seqs=1, shed=True), blocks=32)
    machine.add([0], 8)
    machine.step()
    late = machine.add([0], 1, deadline_ms=3.0)
    machine.run()
    assert (late.finish_reason, late.num_output_tokens) == ("shed", 0)
    assert machine.scheduler.num_shed == 1
    hopeless = machine.add([0], 8, deadline_ms=5.0)  # each step takes a millisecond
    machine.run()
    assert (hopeless.finish_reason, hopeless.num_output_tokens) == ("shed", 0)


def test_every_sample_is_shed_at_its_deadline() -> None:
    machine = make(Continuous(max_num_seqs=4, shed=True), blocks=32)
    first = machine.add([0], 20, n=3, deadline_ms=5.5)
    samples = [first, *first.unstarted]
    machine.run()
    assert [one.finish_reason for one in samples] == ["shed"] * 3
    assert all(0 < one.num_output_tokens < 20 for one in samples)


def test_without_shedding_a_late_request_is_served() -> None:
    machine = make(Continuous(max_num_seqs=1), blocks=32)
    machine.add([0], 8)
    machine.step()
    late = machine.add([0], 1, deadline_ms=3.0)
    machine.run()
    assert late.finish_reason == "length"
