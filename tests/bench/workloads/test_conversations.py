"""Conversations: when a turn is due, what its prompt has become, and what is reused of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.bench.driver import drive, full_batch, warm_up
from minivllm.bench.metrics.metrics import compute
from minivllm.bench.metrics.request_trace import RequestTrace
from minivllm.bench.metrics.validity import Evidence, check
from minivllm.bench.workloads.arrivals import Arrival, Concurrency, Constant, Offline, Poisson
from minivllm.bench.workloads.lazy_prompt import JoinedPrompt, LazyPrompt, answer_positions, runs_of
from minivllm.bench.workloads.multi_turn import MultiTurn
from minivllm.bench.workloads.workload import Workload, WorkloadRequest
from minivllm.config.compose import build, compose
from minivllm.engine.options import SamplingParams
from minivllm.errors import BadInput
from tests.bench.scripted import ScriptedClock, ScriptedEngine

ROOFLINE = ("engine=simulated", "engine.bandwidth_gb_s=20", "engine.tflops=0.5")


def conversations(*each: list[tuple[list[int], int, float]]) -> Workload:
    """Conversations a, b, ...: of each its turns, as the user's tokens, the answer's length and the
    think time."""
    requests: list[WorkloadRequest] = []
    for i, turns in enumerate(each):
        before: WorkloadRequest | None = None
        for turn, (ids, output, think_s) in enumerate(turns):
            name = f"{chr(ord('a') + i)}{turn}"
            request = WorkloadRequest(name, tuple(ids), output, True)
            if before is not None:
                request = replace(
                    request, follows=before.request_id, think_s=think_s, history_len=before.length
                )
            requests.append(request)
            before = request
    return Workload(tuple(requests))


TWO = conversations(
    [([9, 8], 2, 0.0), ([7], 3, 5.0), ([6, 6], 1, 0.5)], [([5], 1, 0.0), ([4], 2, 2.0)]
)


def run(
    work: Workload, arrival: Arrival, **engine: Any
) -> tuple[ScriptedEngine, list[RequestTrace]]:
    under_test = ScriptedEngine(ScriptedClock(10.0), **engine)
    return under_test, drive(under_test, work, arrival, SamplingParams(), under_test.clock)


def test_a_turn_is_due_at_the_end_of_the_last_answer_plus_think_time() -> None:
    """Steps of 1 s from 10 s on; a0 has its 2 tokens at 12 s, b0 its 1 at 11 s."""
    engine, traces = run(TWO, Offline())
    assert [trace.request_id for trace in traces] == ["a0", "a1", "a2", "b0", "b1"]
    times = {t.request_id: (t.scheduled_s, t.started_s, t.token_times) for t in traces}
    assert times == {
        "a0": (10, 10, [11, 12]),
        "b0": (10, 10, [11]),
        "b1": (13, 13, [14, 15]),  # 11 + 2
        "a1": (17, 17, [18, 19, 20]),  # 12 + 5
        "a2": (20.5, 20.5, [21.5]),  # 20 + 0.5
    }
    assert list(engine.submitted) == ["a0", "b0", "b1", "a1", "a2"]


def test_a_turn_that_the_driver_is_late_for_keeps_its_time() -> None:
    """A step of c0 lasts until 22 s; a1 was due before."""
    work = conversations([([9], 1, 0.0), ([7], 1, 0.25)], [([5], 8, 0.0)])
    _, traces = run(work, Offline(), step_s=2.0)
    late = traces[1]
    assert late.scheduled_s == 12.25 and late.submitted_s == late.started_s == 14
    assert late.token_times == [16]


def test_a_prompt_is_all_that_was_said_before() -> None:
    engine, traces = run(TWO, Offline())
    prompts = {name: prompt for name, (prompt, _) in engine.submitted.items()}
    assert prompts == {
        "a0": [9, 8],
        "a1": [9, 8, 0, 1, 7],  # the scripted engine counts its tokens from 0
        "a2": [9, 8, 0, 1, 7, 0, 1, 2, 6, 6],
        "b0": [5],
        "b1": [5, 0, 4],
    }
    assert [trace.input_tokens for trace in traces] == [2, 5, 10, 1, 3]
    assert all(type(prompt) is list for prompt in prompts.values())


def test_an_answer_that_ends_early_is_all_that_is_carried_on() -> None:
    engine, traces = run(TWO, Offline(), eos_after={"a1": 1})
    assert engine.submitted["a2"][0] == [9, 8, 0, 1, 7, 0, 6, 6]
    free = Workload(tuple(replace(request, ignore_eos=False) for request in TWO.requests))
    assert check(Evidence(traces, free, compute(traces, {}, 2))).reasons == []
    assert (
        "1 outputs are not as long as asked"
        in check(Evidence(traces, TWO, compute(traces, {}, 2))).reasons[0]
    )


def test_in_a_closed_loop_a_client_keeps_to_its_talk() -> None:
    _, traces = run(TWO, Concurrency(1))
    assert {t.request_id: t.scheduled_s for t in traces} == {
        "a0": 10,
        "a1": 17,
        "a2": 20.5,
        "b0": 21.5,
        "b1": 24.5,
    }


def test_in_an_open_loop_only_first_turns_go_by_the_schedule() -> None:
    _, traces = run(TWO, Constant(0.1))
    assert {t.request_id: t.scheduled_s for t in traces} == {
        "a0": 10,
        "a1": 17,
        "b0": 20,
        "a2": 20.5,
        "b1": 23,
    }


@pytest.mark.parametrize(("fault", "status"), [("abort", "aborted"), ("refuse", "refused")])
def test_a_talk_ends_with_an_answer_that_fails(fault: str, status: str) -> None:
    engine, traces = run(TWO, Concurrency(1), **{fault: {"a1"}})
    assert [trace.status for trace in traces] == ["ok", status, status, "ok", "ok"]
    assert "a2" not in engine.submitted and traces[2].error is not None
    assert traces[2].error.startswith("never sent, since a1 was not answered: ")
    assert traces[3].scheduled_s == traces[1].finished_s  # its slot is free


def test_a_wrong_workload_is_named() -> None:
    for follows, named in (("zz", "zz"), ("a1", "a1")):  # nobody, and one whom another follows
        requests = (*TWO.requests, replace(TWO.requests[2], request_id="a9", follows=follows))
        with pytest.raises(BadInput, match=f"request a9 must follow an earlier request.*{named}"):
            run(Workload(requests), Offline())


def test_warm_up_asks_first_turns() -> None:
    engine = ScriptedEngine(ScriptedClock())
    warm_up(engine, TWO, Offline(), SamplingParams(), engine.clock)
    assert [prompt for prompt, _ in engine.submitted.values()] == [[9, 8], [5]]
    assert full_batch(64, Offline(), TWO.num_conversations) == 2


# ---- sessions


def session(name: str, *calls: tuple[int, tuple[int, ...], tuple[float, ...]]) -> list[Any]:
    """Requests of one session: of each the length of its answer, whom it waits for and how long."""
    return [
        WorkloadRequest(
            f"{name}{i}",
            (1, 2, i),
            output,
            True,
            session=name,
            after=tuple(f"{name}{j}" for j in after),
            after_s=waits,
        )
        for i, (output, after, waits) in enumerate(calls)
    ]


# a call, two that go on from it side by side, and one that waits for both
FORK = session("f", (1, (), ()), (2, (0,), (1.0,)), (5, (0,), (3.0,)), (1, (1, 2), (9.0, 0.5)))


def test_a_request_is_due_when_all_that_it_waits_for_has_ended() -> None:
    """Steps of 1 s from 10 s on; f0 ends at 11 s, f1 at 14 s and f2 at 19 s: 14 + 9 is later than
    19 + 0.5."""
    _, traces = run(Workload(tuple(FORK)), Offline())
    assert [(t.scheduled_s, t.finished_s) for t in traces] == [
        (10, 11),
        (12, 14),
        (14, 19),
        (23, 24),
    ]
    assert [t.input_tokens for t in traces] == [3, 3, 3, 3]


def test_a_client_of_a_closed_loop_keeps_to_its_session_until_all_of_it_has_ended() -> None:
    background = session("b", (1, (), ()), (1, (0,), (0.0,)), (4, (0,), (2.0,)))
    work = Workload((*background, *session("n", (1, (), ()))))
    _, traces = run(work, Concurrency(1))
    # b1 ends at 12 s, b2, for which nobody waits, at 17 s
    assert [t.scheduled_s for t in traces] == [10, 11, 13, 17]
    assert work.num_conversations == 2 and len(work.openings) == 4


def test_requests_that_wait_for_none_begin_with_their_session() -> None:
    first, second = session("a", (1, (), ()), (1, (), ()))
    work = Workload((replace(first, think_s=0.5), replace(second, think_s=2.0)))
    _, traces = run(Workload((*session("z", (3, (), ())), *work.requests)), Concurrency(1))
    assert [t.scheduled_s for t in traces] == [10, 13.5, 15]


def test_a_session_ends_where_an_answer_fails_and_frees_its_slot() -> None:
    work = Workload((*FORK, *session("g", (1, (), ()))))
    engine, traces = run(work, Concurrency(1), abort={"f1"})
    assert [t.status for t in traces] == ["ok", "aborted", "ok", "aborted", "ok"]
    assert "f3" not in engine.submitted
    assert traces[4].scheduled_s == 19  # when f2 has ended


def test_sessions_have_hashes_of_their_own() -> None:
    def changed(index: int, **fields: Any) -> str:
        requests = list(FORK)
        requests[index] = replace(requests[index], **fields)
        return Workload(tuple(requests)).hash

    base = Workload(tuple(FORK))
    renamed = [
        replace(
            r, request_id=f"x{r.request_id}", after=tuple(f"x{a}" for a in r.after), session="y"
        )
        for r in FORK
    ]
    hashes = {
        base.hash,
        changed(3, after_s=(9.0, 0.6)),
        changed(3, after=("f1",), after_s=(9.0,)),
        changed(3, session=None, after=(), after_s=()),
        Workload(tuple(FORK), priming=(FORK[0],)).hash,
    }
    assert len(hashes) == 5 and Workload(tuple(renamed)).hash == base.hash


def test_sessions_are_stored_with_what_primes_them(tmp_path: Path) -> None:
    work = Workload(tuple(FORK), priming=(replace(FORK[0], request_id="p0"),))
    rows = pq.read_table(work.save(tmp_path)).to_pylist()
    assert [row["primes"] for row in rows] == [True, None, None, None, None]
    assert rows[4]["after"] == ["f1", "f2"] and rows[4]["after_s"] == [9.0, 0.5]


def test_a_session_whose_request_waits_for_a_later_one_is_named() -> None:
    wrong = [replace(FORK[0], after=("f2",), after_s=(1.0,)), *FORK[1:]]
    with pytest.raises(BadInput, match=r"request f0 must follow an earlier request.*f2"):
        run(Workload(tuple(wrong)), Offline())


@given(
    st.lists(
        st.lists(
            st.tuples(
                st.lists(st.integers(0, 9), min_size=1, max_size=3),
                st.integers(1, 4),
                st.floats(0, 3),
            ),
            min_size=1,
            max_size=4,
        ),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([Offline(), Concurrency(1), Concurrency(2), Poisson(0.3)]),
    st.integers(1, 3),
    st.floats(0.1, 2.0),
)
def test_any_talks_are_whole_and_valid(
    each: Any, arrival: Arrival, seqs: int, step_s: float
) -> None:
    work = conversations(*each)
    _, traces = run(work, arrival, max_num_seqs=seqs, step_s=step_s)
    assert (
        check(
            Evidence(
                traces, work, compute(traces, {}, full_batch(seqs, arrival, work.num_conversations))
            )
        ).reasons
        == []
    )
    ends = {trace.request_id: trace.finished_s for trace in traces}
    for request, trace in zip(work.requests, traces, strict=True):
        assert trace.input_tokens == request.history_len + len(request.prompt_token_ids)
        if request.follows is not None:
            assert trace.scheduled_s == ends[request.follows] + request.think_s
    if arrival.concurrency is not None:
        changes = sorted(c for t in traces for c in ((t.submitted_s, 1), (t.finished_s, -1)))
        assert (
            max(sum(c for _, c in changes[: i + 1]) for i in range(len(changes)))
            <= arrival.concurrency
        )


@given(
    st.lists(
        st.lists(
            st.tuples(
                st.integers(1, 4),
                st.lists(st.tuples(st.integers(0, 5), st.floats(0, 3)), max_size=3),
            ),
            min_size=1,
            max_size=6,
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([Offline(), Concurrency(1), Concurrency(2), Poisson(0.3)]),
    st.sets(st.sampled_from(["a1", "b0", "c2"]), max_size=2),
    st.integers(1, 3),
)
def test_any_sessions_wait_for_what_they_say(
    each: Any, arrival: Arrival, refuse: set[str], seqs: int
) -> None:
    """Each call waits for some of those before it; a refused one ends what waits for it."""
    requests: list[WorkloadRequest] = []
    for k, calls in enumerate(each):
        waits = [{j: s for j, s in before if j < i} for i, (_, before) in enumerate(calls)]
        shape = [
            (output, tuple(wait), tuple(wait.values()))
            for (output, _), wait in zip(calls, waits, strict=True)
        ]
        requests += session(chr(ord("a") + k), *shape)
    work = Workload(tuple(requests))
    engine, traces = run(work, arrival, max_num_seqs=seqs, refuse=refuse)
    by_name = {trace.request_id: trace for trace in traces}
    assert list(by_name) == [request.request_id for request in requests]
    lost = set(refuse)
    for request in requests:
        trace = by_name[request.request_id]
        if request.request_id in lost or lost & {*request.after}:
            lost.add(request.request_id)
            assert not trace.completed
            continue
        assert trace.completed and request.request_id in engine.submitted
        if request.after:
            ends = [by_name[name].finished_s or 0.0 for name in request.after]
            due = max(end + wait for end, wait in zip(ends, request.after_s, strict=True))
            assert trace.scheduled_s == due
    if arrival.concurrency is not None:
        changes: list[tuple[float, int]] = []
        for name in {request.session for request in requests}:
            own = [by_name[r.request_id] for r in requests if r.session == name]
            changes.append((min(t.scheduled_s for t in own), 1))
            changes.append((max(t.finished_s or 0.0 for t in own), -1))
        changes.sort()
        under_way = [sum(c for _, c in changes[: i + 1]) for i in range(len(changes))]
        assert max(under_way) <= arrival.concurrency


# ---- the workload


def encode(text: str) -> list[int]:
    return [ord(character) % 256 for character in text]


def test_conversations_are_drawn_and_repeat() -> None:
    work = MultiTurn(
        num_conversations=3, turns={"distribution": "uniform", "min": 2, "max": 5}
    ).generate(encode, 256, 999, 1)
    assert work == MultiTurn(3, {"distribution": "uniform", "min": 2, "max": 5}).generate(
        encode, 256, 999, 1
    )
    first = [request for request in work.requests if request.follows is None]
    assert [request.request_id for request in first] == [
        "r0.0",
        "r1.0",
        "r2.0",
    ] and work.num_conversations == 3
    place = {request.request_id: request for request in work.requests}
    for request in work.requests:
        assert 16 <= len(request.prompt_token_ids) <= 64 and 32 <= request.max_tokens <= 96
        if request.follows is not None:
            assert (
                request.history_len == place[request.follows].length
                and (request.think_s or -1) >= 0
            )
            assert len(request.stand_in) + request.max_tokens == request.length
    assert len({request.think_s for request in work.requests}) > 3


def test_think_times() -> None:
    fixed = MultiTurn(2, 3, think="fixed", think_s=1.5).generate(None, 50, 999, 0)
    assert {request.think_s for request in fixed.requests} == {None, 1.5}
    drawn = MultiTurn(500, 5, 1, 1, think_s=2.0).generate(None, 50, 999, 0)
    times = [request.think_s for request in drawn.requests if request.think_s is not None]
    assert len(times) == 2000 and sum(times) / 2000 == pytest.approx(2.0, rel=0.08)


def test_a_conversation_beyond_the_context_is_refused_early() -> None:
    with pytest.raises(
        BadInput, match=r"longest last turn has 544 prompt \+ 96 output .*lower workload\.turns"
    ):
        MultiTurn().check_lengths(639)
    MultiTurn().check_lengths(640)
    wide = {"distribution": "lognormal", "mean": 50, "std": 40}
    with pytest.raises(BadInput, match=r"turn \d of conversation \d has \d+ prompt"):
        MultiTurn(input_len=wide).generate(None, 50, 400, 0)


def test_talks_are_stored_and_have_a_hash_of_their_own(tmp_path: Path) -> None:
    work = MultiTurn(2, 3).generate(encode, 256, 999, 0)
    rows = pq.read_table(work.save(tmp_path)).to_pylist()
    assert [(row["follows"], row["think_s"]) for row in rows] == [
        (r.follows, r.think_s) for r in work.requests
    ]
    assert [row["history_len"] or 0 for row in rows] == [r.history_len for r in work.requests]
    alone = Workload(
        tuple(replace(r, follows=None, think_s=None, history_len=0) for r in work.requests)
    )
    longer = Workload(tuple(replace(r, think_s=9.0) if r.follows else r for r in work.requests))
    renamed = {r.request_id: f"x{i}" for i, r in enumerate(work.requests)}
    other = tuple(
        replace(r, request_id=renamed[r.request_id], follows=renamed.get(r.follows or ""))
        for r in work.requests
    )
    assert len({work.hash, alone.hash, longer.hash}) == 3 and Workload(other).hash == work.hash


# ---- what is reused


def reused(*overrides: str) -> float:
    """Prompt tokens that the prefix cache gave the second and third turns of one conversation."""
    config = compose(["runtime.device=cpu", "quant=fp32", "cache.prefix_caching=true", *overrides])
    engine = build(config["engine"], config=config)
    work = MultiTurn(1, 3, input_len=40, output_len=24, think="fixed", think_s=0.0).generate(
        None, 4000, 2048, 0
    )
    traces = drive(engine, work, Offline(), SamplingParams(), engine.info.clock or ScriptedClock())
    assert [trace.input_tokens for trace in traces] == [40, 104, 168]
    counted = engine.liveness()["cache"]["prefix_tokens_reused"]
    engine.close()
    return float(counted)


def test_the_cache_knows_the_turns_before() -> None:
    """Blocks of 16: of 40 + 23 computed tokens 3 are full, of 104 + 23 there are 7."""
    assert reused() == 16 * (3 + 7)


def test_so_does_a_simulated_one() -> None:
    assert reused(*ROOFLINE) == 16 * (3 + 7)


def test_joined_prompts_are_sequences() -> None:
    lazy = LazyPrompt((range(5, 9),), 50, 0)
    prompt = JoinedPrompt((lazy, (1, 2), answer_positions("a", 3)))
    assert (
        len(prompt) == 9
        and list(prompt)[:6] == [*lazy, 1, 2]
        and prompt[4] == 1
        and prompt[4:6] == (1, 2)
    )
    assert runs_of(prompt) == (range(5, 9), (1, 2), answer_positions("a", 3))
    assert runs_of([3, 4]) == ((3, 4),)
    assert answer_positions("a", 3) != answer_positions("b", 3)
