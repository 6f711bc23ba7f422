"""A session's replay: who waits for whom, for how long, and where a random start begins."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from minivllm.bench.workloads.agents.session import (
    AgentCall,
    AgentSession,
    SessionReplay,
    in_order,
    random_start,
    without_long_gaps,
)
from minivllm.bench.workloads.agents.text import MARKER_LEN

REPLAY = SessionReplay(vocab_size=100, seed=0)


def made(start_s: float, took_s: float, *after: int, **more: object) -> AgentCall:
    return replace(AgentCall((range(0, 40),), 4, start_s, start_s + took_s, after=after), **more)


# two calls, two sub-agents side by side, and a call that waits for both
TREE = AgentSession(
    "x",
    (
        made(0, 2),
        made(3, 1, 0),
        made(5, 1, 1, agent="a"),
        made(6, 9, 1, agent="b"),
        made(7, 1, 2, agent="a"),
        made(16, 1, 1, 3, 4),
    ),
)


def test_calls_wait_from_end_to_start() -> None:
    requests, priming = REPLAY.requests(TREE, 7)
    assert priming == [] and [request.request_id for request in requests] == [
        f"s7.{i}" for i in range(6)
    ]
    assert [(r.after, r.after_s) for r in requests] == [
        ((), ()),
        (("s7.0",), (1.0,)),
        (("s7.1",), (1.0,)),
        (("s7.1",), (2.0,)),
        (("s7.2",), (1.0,)),
        # the last of them had ended at 15 s, so one second after whichever ends last
        (("s7.1", "s7.3", "s7.4"), (1.0, 1.0, 1.0)),
    ]
    assert requests[0].think_s == 0 and {r.session for r in requests} == {"s7"}
    assert all(r.ignore_eos and r.max_tokens == 4 for r in requests)


def test_each_replay_has_a_marker_behind_what_replays_share() -> None:
    session = AgentSession("x", (made(0, 1, shared_len=16), made(2, 1, 0, shared_len=16)))
    (first, second), _ = REPLAY.requests(session, 0)
    (other, _), _ = REPLAY.requests(session, 1)
    one, two, three = (tuple(r.prompt_token_ids) for r in (first, second, other))
    assert one == two and len(one) == 40
    assert one[:16] == three[:16] and one[24:] == three[24:]
    assert one[16 : 16 + MARKER_LEN] != three[16 : 16 + MARKER_LEN]
    plain = replace(REPLAY, cache_bust=False)
    assert tuple(plain.requests(session, 0)[0][0].prompt_token_ids) == tuple(
        plain.requests(session, 1)[0][0].prompt_token_ids
    )


def test_a_prompt_too_short_for_the_marker_moves_it_to_the_front_of_all() -> None:
    session = AgentSession("x", (made(0, 1, shared_len=36), made(2, 1, 0, shared_len=36)))
    (first, second), _ = REPLAY.requests(session, 0)
    assert tuple(first.prompt_token_ids) == tuple(second.prompt_token_ids)
    (other, _), _ = REPLAY.requests(session, 1)
    assert tuple(other.prompt_token_ids)[:MARKER_LEN] != tuple(first.prompt_token_ids)[:MARKER_LEN]


def test_a_random_start_goes_on_from_there() -> None:
    """At 6.5 s both sub-agents have begun; a has a call left, b and the main agent wait."""
    requests, priming = REPLAY.requests(TREE, 0, start_s=6.5)
    assert [r.request_id for r in requests] == ["s0.4", "s0.5"]
    assert requests[0].after == () and requests[0].think_s == 0.5
    assert requests[1].after == ("s0.4",)
    # of each agent that goes on its latest call
    assert [r.request_id for r in priming] == ["p0.1", "p0.2"]


def test_a_random_start_leaves_a_call() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        start_s = random_start(TREE, rng)
        assert start_s is not None
        requests, priming = REPLAY.requests(TREE, 0, start_s)
        assert requests and priming and len(requests) < len(TREE.calls)
    assert random_start(AgentSession("x", (made(0, 5),)), rng) is None


def test_long_gaps_between_starts_are_cut_and_what_overlaps_still_does() -> None:
    session = AgentSession("x", (made(0, 30), made(60, 1, 0), made(61, 1, 0), made(100, 1, 1)))
    calls = without_long_gaps(session, 10.0).calls
    assert [call.start_s for call in calls] == [0, 10, 11, 21]
    assert calls[0].end_s == 30
    (_, second, _, last), _ = REPLAY.requests(replace(session, calls=calls), 0)
    assert second.after_s == (0.0,)  # it was sent before the end, by these times
    assert last.after_s == (10.0,)
    given = AgentSession("x", (made(0, 0), made(0, 0, 0, waits_s=(99.0,))))
    assert without_long_gaps(given, 10.0).calls[1].waits_s == (10.0,)


def test_calls_are_put_in_order_with_those_they_wait_for() -> None:
    calls = in_order([made(0, 1), made(9, 1, 0), made(2, 1, 0), made(9, 1, 2)])
    assert [call.start_s for call in calls] == [0, 2, 9, 9]
    assert [call.after for call in calls] == [(), (0,), (0,), (1,)]
