"""Replicas of a simulated engine: events in the order of time, routing, handing over."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.bench.driver import drive
from minivllm.bench.metrics.request_trace import RequestTrace
from minivllm.bench.metrics.rows import breakdown
from minivllm.bench.workloads.arrivals import Arrival, Offline, Poisson
from minivllm.bench.workloads.workload import Workload
from minivllm.config.compose import compose
from minivllm.engine.options import SamplingParams
from minivllm.engines.simulated.cluster import SimulatedCluster
from minivllm.errors import BadInput
from tests.bench.scripted import workload
from tests.engines.simulated.test_engine import ROOFLINE, Planted, engine

TWO = ("parallel.replicas=2", "parallel.router=round_robin")
APART = ("parallel.replicas=2", "parallel.disaggregated=true", "cache.prefix_caching=true")


def cluster(*overrides: str) -> SimulatedCluster:
    return SimulatedCluster(compose([*ROOFLINE, *overrides]))


built = cache(cluster)


def emptied(*overrides: str) -> SimulatedCluster:
    """One that has served others, as it takes far longer to make one than to serve a few."""
    under_test = built(*overrides)
    under_test.reset()
    return under_test


def run(
    work: Workload,
    *overrides: str,
    arrival: Arrival | None = None,
    make: Callable[..., SimulatedCluster] = cluster,
) -> tuple[SimulatedCluster, list[RequestTrace]]:
    """100 ms a step and 1 ms a prompt token, on every replica."""
    under_test = make(*overrides)
    for one in under_test.engines:
        one.step_times = Planted()
    arrival = arrival or Offline()
    return under_test, drive(under_test, work, arrival, SamplingParams(), under_test.clock)


def run_as_built(work: Workload, *overrides: str) -> tuple[SimulatedCluster, list[RequestTrace]]:
    """With the times of the roofline."""
    under_test = cluster(*overrides)
    return under_test, drive(under_test, work, Offline(), SamplingParams(), under_test.clock)


def test_each_replica_makes_steps_of_its_own() -> None:
    under_test, (a, b, c) = run(workload((3, 2), (50, 2), (7, 1)), *TWO)
    assert a.token_times == pytest.approx([0.110, 0.210])  # in one step with c
    assert c.token_times == pytest.approx([0.110])
    assert b.token_times == pytest.approx([0.150, 0.250])  # alone
    assert [step["replica"] for step in under_test.steps()] == [0, 1, 0, 1]
    parallel = under_test.liveness()["parallel"]
    assert parallel["replicas"] == 2 and parallel["requests"] == "2 | 1"


def test_a_request_that_comes_while_others_compute_starts_at_once_where_nobody_does() -> None:
    class AtTimes(Offline):
        def due(self, requests: Any, seed: int) -> list[float]:
            return [0.0, 0.05]

    knobs = ("parallel.replicas=2", "parallel.router=least_tokens")
    _, (a, b) = run(workload((3, 1), (5, 1)), *knobs, arrival=AtTimes())
    assert a.token_times == pytest.approx([0.103])
    assert b.started_s == pytest.approx(0.05) and b.token_times == pytest.approx([0.155])


def test_one_replica_is_one_engine() -> None:
    work = workload(*[(8 * n + 1, n % 5 + 1) for n in range(24)])
    alone = engine("batching.max_num_seqs=4")
    expected = drive(alone, work, Poisson(rate=400.0), SamplingParams(), alone.clock)
    under_test = cluster("batching.max_num_seqs=4")
    found = drive(under_test, work, Poisson(rate=400.0), SamplingParams(), under_test.clock)
    assert [t.token_times for t in found] == [pytest.approx(t.token_times) for t in expected]


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 9)), min_size=1, max_size=20),
    st.integers(2, 4),
    st.sampled_from(["round_robin", "least_tokens", "prefix_aware", "session"]),
    st.booleans(),
)
def test_every_request_ends_once_and_time_goes_on(
    shapes: list[tuple[int, int]], replicas: int, router: str, apart: bool
) -> None:
    knobs = [f"parallel.replicas={replicas}", f"parallel.router={router}"]
    knobs += ["cache.prefix_caching=true", f"parallel.disaggregated={apart}"]
    knobs += ["engine.link_gb_s=0.001", "engine.link_us=300"]
    arrival = Poisson(rate=30.0)
    under_test, traces = run(workload(*shapes), *knobs, arrival=arrival, make=emptied)
    assert [len(trace.token_ids) for trace in traces] == [wanted for _, wanted in shapes]
    assert all(trace.finish_reason == "length" for trace in traces)
    assert all(a <= b for trace in traces for a, b in pairwise(trace.token_times))
    for one in under_test.engines:
        assert one.num_unfinished == 0 and one.cache.pool.num_used == 0
        one.cache.pool.check_integrity([])
    assert not any(under_test.routing.router.queued)
    under_test.reset()
    again = drive(under_test, workload(*shapes), arrival, SamplingParams(), under_test.clock)
    assert [t.token_times for t in again] == [t.token_times for t in traces]


def test_an_answer_goes_on_where_its_keys_and_values_were_sent() -> None:
    link = ("engine.link_gb_s=0.001", "engine.link_us=2000", "cache.block_size=16")
    under_test, (a,) = run(workload((33, 3)), *APART, *link)
    handed = 34 * under_test.engines[0].kv_bytes_per_token / 1e6 + 0.002 * 1e0
    # Two blocks of 16 are found; the other 2 of 34 tokens are computed again.
    first, second, third = a.token_times
    assert first == pytest.approx(0.133)
    assert second == pytest.approx(first + handed + 0.102)
    assert third == pytest.approx(second + 0.1)
    live = under_test.liveness()
    assert live["parallel"]["tokens_handed_over"] == 34
    num_bytes = 34 * under_test.engines[0].kv_bytes_per_token
    assert a.kv_transfer == (num_bytes, pytest.approx(1e3 * handed), 0.0)
    assert live["cache"]["prefix_tokens_reused"] == 0  # what was handed over is no hit
    assert [step["replica"] for step in under_test.steps()] == [0, 1, 1]


def test_ranks_have_more_room_for_keys_and_values() -> None:
    knobs = ("engine.memory_gb=0.5", "engine.link_gb_s=10", "cache.memory_fraction=0.5")
    one, two = (cluster(*TWO, *knobs, f"parallel.tensor={ranks}") for ranks in (1, 2))
    blocks = [each.engines[0].cache.pool.num_usable for each in (one, two)]
    assert isinstance(blocks[1], int) and blocks[1] > 2 * blocks[0]
    assert "2 ranks over links" in two.info.warnings[0]
    assert drive(two, workload((9, 4)), Offline(), SamplingParams(), two.clock)[0].completed


def test_answers_of_one_token_are_not_handed_over() -> None:
    under_test, (a,) = run(workload((5, 1)), *APART)
    assert a.token_times == pytest.approx([0.105])
    assert under_test.liveness()["parallel"]["tokens_handed_over"] == 0


def test_requests_end_early_wherever_they_are() -> None:
    under_test = cluster(*APART, "engine.link_us=1000000")
    for number, (_, wanted) in enumerate([(5, 1), (5, 8), (5, 8)]):
        under_test.submit(str(number), [1, 2, 3], SamplingParams(max_tokens=wanted))
    under_test.abort("0")
    while not under_test.poll(1.0):
        pass
    under_test.abort("1")  # on the way to another replica
    seen = [output for _ in range(40) for output in under_test.poll(1.0)]
    assert {output.request_id for output in seen} == {"2"}
    assert sum(len(output.token_ids) for output in seen) == 7
    assert not any(one.num_unfinished for one in under_test.engines)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.disaggregated=true"], "parallel.prefill_replicas.*parallel.replicas=1"),
        ([*APART, "cache.prefix_caching=false"], "parallel.disaggregated.*prefix_caching=true"),
        (["parallel.tensor=2"], "parallel.tensor=2.*engine.link_gb_s"),
        (["parallel.replicas=1", "engine.driver_us=9"], "engine.driver_us=9.*parallel.replicas"),
    ],
)
def test_what_cannot_be_simulated_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        cluster(*overrides)


def test_the_driving_process_takes_time_of_every_token() -> None:
    work = workload((3, 2), (5, 3), (7, 4))
    alone, driven = (run_as_built(work, *TWO, f"engine.driver_us={us}")[0] for us in ("0", "500"))
    pairs = list(zip(alone.steps(), driven.steps(), strict=True))
    assert len(pairs) == 7
    for before, after in pairs:
        taken = after["forward_ms"] - before["forward_ms"]
        assert taken == pytest.approx(0.5 * before["num_requests"])
    said = "500 us a token for the driving process"
    assert said in driven.info.warnings[0] and "driving" not in alone.info.warnings[0]


def test_steps_of_simulated_ranks_say_what_their_collectives_take() -> None:
    knobs = ("parallel.tensor=2", "engine.link_gb_s=1", "engine.link_us=50")
    under_test, _ = run_as_built(workload((3, 2), (5, 3)), "parallel.replicas=2", *knobs)
    steps = under_test.steps()
    assert {step["replica"] for step in steps} == {0, 1}
    for step in steps:
        between = step["collective_ms"]
        assert 0 < between < step["forward_ms"]
    share = breakdown(steps).collective_share
    assert share is not None and 0 < share < 1
    alone, _ = run_as_built(workload((3, 2)), "parallel.replicas=2")
    assert "collective_ms" not in alone.steps()[0]
