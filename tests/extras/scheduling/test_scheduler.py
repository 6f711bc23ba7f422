"""Requests that grow beyond the length at which keys are rotated in another way start again."""

from __future__ import annotations

from minivllm.cache.manager import CacheManager
from minivllm.cache.spec import CacheLayout
from minivllm.engine.batching import Continuous
from minivllm.engine.options import SamplingParams
from minivllm.engine.preemption import Recompute
from minivllm.engine.request import Request
from minivllm.extras.scheduling.scheduler import make_scheduler


def test_a_request_that_has_grown_computes_all_its_tokens_again_once() -> None:
    scheduler = make_scheduler(
        Continuous(), CacheManager(CacheLayout(4, 20)), Recompute(), rotated_anew_at=8
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
