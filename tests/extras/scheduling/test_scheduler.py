"""Requests that grow beyond the length at which keys are rotated in another way start again, and
those that would miss their deadline end."""

from __future__ import annotations

from minivllm.cache.manager import CacheManager
from minivllm.cache.spec import CacheLayout
from minivllm.engine.batching import Continuous
from minivllm.engine.options import SamplingParams
from minivllm.engine.preemption import Recompute
from minivllm.engine.request import Request
from minivllm.extras.scheduling.scheduler import make_scheduler
from tests.engine.imaginary import make


def test_a_request_that_has_grown_computes_all_its_tokens_again_once() -> None:
    scheduler = make_scheduler(
        Continuous(), CacheManager(CacheLayout(4, 20)), Recompute(), restarts_at=8
    )
    params = SamplingParams(ignore_eos=True)
    grown, short, long = (
        Request(str(length), [0] * length, params, max_num_tokens=most, seed=0)
        for length, most in ((5, 12), (2, 8), (9, 12))
    )
    for request in (grown, short, long):
        scheduler.add(request)
    computed = {request: 0 for request in (grown, short, long)}
    while scheduler.has_unfinished:
        for part in scheduler.plan().scheduled:
            scheduler.computed(part)
            computed[part.request] += part.num_tokens
            if part.samples and part.request.append(1) is not None:
                scheduler.finish(part.request, "length")
    assert computed == {grown: 7 + 11, short: 7, long: 11}
    assert grown.num_preemptions == 1 and short.num_preemptions == long.num_preemptions == 0
    assert (grown.num_rotated_tokens, long.num_rotated_tokens) == (8, 9)


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
