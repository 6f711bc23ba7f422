"""Routing: each request goes to one live replica, sessions stay, prefixes are remembered as a pool
would."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.errors import BadInput
from minivllm.models.vision.inputs import ImageSpan, ProcessedImage, RequestInputs
from minivllm.parallel.options import ParallelOptions
from minivllm.processes.router import (
    CacheShape,
    LeastTokens,
    PrefixAware,
    RoundRobin,
    RoutedRequest,
    Router,
    RoutingFailed,
    StickySession,
    block_hashes,
    make_router,
)

POLICIES = ("least_tokens", "prefix_aware", "round_robin", "session")
SHAPE = CacheShape(block_size=4, num_blocks=16)


def router_of(policy: str, replicas: int, cache: CacheShape = SHAPE) -> Router:
    return make_router(ParallelOptions(replicas=replicas, router=policy), cache)


def request(name: str, prompt: list[int], output: int = 0, session: str | None = None) -> Any:
    return RoutedRequest(name, prompt, output, session)


# What may happen: a request comes (tokens of its prompt, session), the oldest one ends, a replica
# dies.
EVENTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("request"),
            st.lists(st.integers(0, 2), min_size=1, max_size=24),
            st.sampled_from((None, "a", "b", "c")),
        ),
        st.tuples(st.just("end"), st.integers(0, 100), st.none()),
        st.tuples(st.just("death"), st.integers(0, 4), st.none()),
    ),
    max_size=60,
)


@pytest.mark.parametrize("policy", POLICIES)
@given(replicas=st.integers(1, 5), events=EVENTS)
@settings(max_examples=60, deadline=None)
def test_each_request_goes_to_one_live_replica(
    policy: str, replicas: int, events: list[tuple[str, Any, str | None]]
) -> None:
    router = router_of(policy, replicas)
    at: dict[str, tuple[int, int]] = {}  # replica and tokens of the unfinished, in order
    homes: dict[str, int] = {}
    for number, (what, value, session) in enumerate(events):
        if what == "end" and at:
            name = list(at)[value % len(at)]
            del at[name]
            router.end(name)
        elif what == "death" and len(router.alive) > 1 and value in router.alive:
            expected = [name for name, (replica, _) in at.items() if replica == value]
            assert router.lose(value) == expected
            for name in expected:
                del at[name]
            homes = {name: replica for name, replica in homes.items() if replica != value}
        elif what == "request":
            replica = router.route(request(f"r{number}", value, 3, session))
            assert replica in router.alive
            at[f"r{number}"] = replica, len(value) + 3
            if policy == "session" and session is not None:
                assert homes.setdefault(session, replica) == replica
        queued = [
            sum(tokens for replica, tokens in at.values() if replica == one)
            for one in range(replicas)
        ]
        assert router.queued == queued
    assert sum(router.given) == sum(what == "request" for what, _, _ in events)


@pytest.mark.parametrize("policy", POLICIES)
def test_without_a_replica_nothing_is_routed(policy: str) -> None:
    router = router_of(policy, 2)
    router.route(request("r0", [1, 2]))
    assert sorted([*router.lose(0), *router.lose(1)]) == ["r0"]
    with pytest.raises(RuntimeError, match="no replica is alive"):
        router.route(request("r1", [1, 2]))


def test_requests_of_the_dead_are_counted_where_others_take_them() -> None:
    router = LeastTokens(2)
    for name in ("r0", "r1", "r2"):
        router.route(request(name, [1]))
    assert router.lose(0) == ["r0", "r2"] and router.counters["requests_rerouted"] == 2
    assert router.lose(1) == ["r1"] and router.counters["requests_rerouted"] == 2


def test_each_in_turn() -> None:
    router = RoundRobin(3)
    assert [router.route(request(f"r{i}", [1] * (9 - i))) for i in range(4)] == [0, 1, 2, 0]
    router.lose(1)
    assert [router.route(request(f"s{i}", [1])) for i in range(3)] == [2, 0, 2]
    assert router.given == [3, 1, 3]


def test_the_fewest_tokens_of_prompts_and_outputs() -> None:
    router = LeastTokens(2)
    assert router.route(request("long", [1] * 8, output=10)) == 0
    assert [router.route(request(f"r{i}", [1] * 4, output=2)) for i in range(3)] == [1, 1, 1]
    # equally many tokens: the replica with fewer requests so far
    assert router.queued == [18, 18] and router.route(request("r3", [1])) == 0
    router.end("r0")
    router.end("r0")  # a second time is ignored
    assert router.queued == [19, 12] and router.route(request("r4", [1])) == 1


def test_a_session_stays_and_moves_only_when_its_replica_dies() -> None:
    router = StickySession(3)
    first = router.route(request("a0", [1] * 90, session="a"))
    others = {router.route(request(f"b{i}", [1] * 9, session=f"b{i}")) for i in range(4)}
    assert first not in others
    assert router.route(request("a1", [1], session="a")) == first
    assert router.route(request("alone", [1])) != first  # no session: the least loaded
    router.lose(first)
    moved = router.route(request("a2", [1], session="a"))
    assert moved != first and router.route(request("a3", [1] * 99, session="a")) == moved
    assert router.route(request("a4", [1], session="a")) == moved
    assert router.counters["session_matches"] == 3


def test_the_session_that_was_silent_longest_is_forgotten() -> None:
    router = StickySession(2, most_sessions=2)
    for name in ("a", "b", "a", "c"):  # b is forgotten
        router.route(request(f"r{name}{router.given}", [1], session=name))
    before = router.counters["session_matches"]
    router.route(request("ra", [1], session="a"))
    router.route(request("rb", [1], session="b"))
    assert router.counters["session_matches"] == before + 1


def prefix_router(replicas: int, blocks: int = 16, weight: float = 0.1) -> PrefixAware:
    return PrefixAware(replicas, CacheShape(4, blocks), weight)


def test_the_longest_prefix_then_the_load() -> None:
    router = prefix_router(3)
    one, two = [1] * 8, [2] * 8
    assert router.route(request("r0", [*one, 5])) == 0
    assert router.route(request("r1", [*two, 5])) == 1
    assert router.route(request("r2", [*one, 6])) == 0
    # The first block of `one`, then others: the shorter prefix is there on replica 0 alone.
    assert router.route(request("r3", [1, 1, 1, 1, 7, 7, 7, 7, 8])) == 0
    assert router.route(request("r4", [3] * 9)) == 2  # nobody has it: the least loaded
    assert router.counters["prefix_matches"] == 2
    assert router.counters["prefix_tokens_matched"] == 8 + 4


def test_a_long_queue_outweighs_a_short_prefix() -> None:
    router = prefix_router(2, weight=1.0)
    prompt = [1] * 8
    replicas = [router.route(request(f"r{i}", [*prompt, i])) for i in range(8)]
    assert {0, 1} == set(replicas) and abs(router.queued[0] - router.queued[1]) <= 9
    assert router.counters["overloads_avoided"] == 1  # then both have the prefix
    heedless = prefix_router(2, weight=0.0)
    assert [heedless.route(request(f"r{i}", [*prompt, i])) for i in range(8)] == [0] * 8


def test_what_is_remembered_is_bounded_and_evicted_least_recently_used_first() -> None:
    router = prefix_router(1, blocks=4)
    held = router._held[0]
    old, new = [1] * 9, [2] * 9
    router.route(request("r0", old))
    router.route(request("r1", new))
    router.route(request("r2", old))  # now `new` is the one that was used longer ago
    router.route(request("r3", [3] * 5))  # one block: the last block of `new` goes
    assert len(held) == 4
    assert [name in held for name in block_hashes(old, 4)] == [True, True]
    assert [name in held for name in block_hashes(new, 4)] == [True, False]


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=40), max_size=30),
    blocks=st.integers(1, 12),
)
@settings(max_examples=60, deadline=None)
def test_a_remembered_block_comes_with_all_blocks_before_it(
    prompts: list[list[int]], blocks: int
) -> None:
    router = prefix_router(1, blocks=blocks)
    chains = [block_hashes(prompt, 4) for prompt in prompts]
    for number, prompt in enumerate(prompts):
        router.route(request(f"r{number}", prompt))
        held = router._held[0]
        assert len(held) <= blocks
        for chain in chains:
            there = [name in held for name in chain]
            assert there == sorted(there, reverse=True)


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=40), max_size=30),
    blocks=st.integers(1, 12),
    dead=st.integers(0, 2),
)
@settings(max_examples=60, deadline=None)
def test_all_replicas_are_looked_up_at_once(
    prompts: list[list[int]], blocks: int, dead: int
) -> None:
    router = prefix_router(3, blocks=blocks)
    for number, prompt in enumerate(prompts):
        router.route(request(f"r{number}", prompt))
    router.lose(dead)
    for prompt in prompts:
        hashes = block_hashes(prompt, 4)
        one_by_one = [
            next((i for i, name in enumerate(hashes) if name not in held), len(hashes))
            for held in router._held
        ]
        assert router._num_held(hashes) == one_by_one
    known = {name for held in router._held for name in held}
    assert {*router._holders} == known  # nothing else is remembered


def test_emptied_caches_are_forgotten_and_a_dead_replica_s() -> None:
    router = prefix_router(2)
    router.route(request("r0", [1] * 9))
    router.forget_prefixes()
    assert router.route(request("r1", [1] * 9)) == 1  # the least loaded, not the one that had it
    router.end("r0")
    router.end("r1")
    assert router.lose(1) == [] and not router._held[1]


def test_counters_begin_anew() -> None:
    router = prefix_router(2)
    for i in range(3):
        router.route(request(f"r{i}", [1] * 9))
    assert router.counters["prefix_matches"] == 2 and router.assignment
    router.recount()
    assert not any(router.counters.values()) and router.given == [0, 0] and not router.assignment


def test_the_assignment_tells_whether_requests_went_elsewhere() -> None:
    def assigned(policy: str, prompts: list[list[int]]) -> int:
        router = router_of(policy, 2)
        for number, prompt in enumerate(prompts):
            router.route(request(f"r{number}", prompt))
        return router.assignment

    equal = [[number] * 5 for number in range(4)]
    assert assigned("round_robin", equal) == assigned("least_tokens", equal)
    assert assigned("round_robin", [*equal, equal[1]]) != assigned(
        "prefix_aware", [*equal, equal[1]]
    )


def test_hashes_are_of_full_blocks_before_the_last_token() -> None:
    assert [len(block_hashes([7] * n, 4)) for n in (1, 4, 5, 8, 9)] == [0, 0, 1, 1, 2]
    first, second = block_hashes([1, 1, 1, 1, 2, 2, 2, 2, 3], 4)
    assert first == block_hashes([1, 1, 1, 1, 9], 4)[0]
    assert second != block_hashes([3, 1, 1, 1, 2, 2, 2, 2, 3], 4)[1]
    assert block_hashes(range(9), 4) == block_hashes(range(100)[:9], 4)  # other sequences


class Last(Router):
    """A router of a user's own."""

    name = "last"

    def choose(self, request: RoutedRequest, alive: Any) -> int:
        return int(alive[-1])


def test_a_router_of_the_user_s_own() -> None:
    # The number is minivllm's to give, whatever a knob of that name says.
    own = {"_target_": f"{__name__}.Last", "num_replicas": 2}
    router = make_router(ParallelOptions(replicas=3, router=own), None)
    assert router.route(request("r0", [1])) == 2 and router.lose(2) == ["r0"]
    assert router.route(request("r0", [1])) == 1
    with pytest.raises(BadInput, match="is no router"):
        make_router(ParallelOptions(router={"_target_": f"{__name__}.NoRouter"}), None)


class Nonsense(Router):
    """A router of a user's own that returns what it is given."""

    def __init__(self, num_replicas: int, answer: Any) -> None:
        super().__init__(num_replicas)
        self.answer = answer

    def choose(self, request: RoutedRequest, alive: Any) -> int:
        if self.answer == "raise":
            raise KeyError(request.request_id)
        return self.answer  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (3, "returned 3"),
        (-1, "returned -1"),
        (1, "returned 1"),  # it is dead
        (None, "returned None"),
        (True, "returned True"),
        (0.0, r"returned 0\.0"),
        ("0" * 10_000, r"returned '000+\.\.\.0+'"),
        ("raise", "raised KeyError: 'r0'"),
    ],
)
def test_a_router_that_chooses_no_live_replica_is_named_in_one_line(
    answer: Any, words: str
) -> None:
    own = {"_target_": f"{__name__}.Nonsense", "answer": answer}
    router = make_router(ParallelOptions(replicas=3, router=own), None)
    router.lose(1)
    with pytest.raises(RoutingFailed, match=rf"parallel\.router: .*Nonsense {words}; .* 0, 2$"):
        router.route(request("r0", [1]))
    assert router.given == [0, 0, 0] and router.queued == [0, 0, 0] and not router.lose(0)


class Unready(Router):
    """A router whose construction leaves out the base's."""

    def __init__(self, num_replicas: int) -> None:
        pass


def test_a_router_calls_the_constructor_of_its_base() -> None:
    own = {"_target_": f"{__name__}.Unready"}
    with pytest.raises(BadInput, match=r"Unready must call Router\.__init__"):
        make_router(ParallelOptions(replicas=2, router=own), None)


def test_different_pictures_share_no_prefix() -> None:
    """Their placeholders are the same tokens; only a picture that comes again is a match."""
    router = router_of("prefix_aware", 2, CacheShape(16, 400))
    where = []
    for number in (*range(8), 0):
        image = ProcessedImage(b"%d" % number, np.zeros((1, 1), np.uint8), 64)
        inputs = RequestInputs((image,), (ImageSpan(3, 64, 0),))
        tokens = inputs.keyed([1, 2, 3] + [49190] * 64 + [7, 8])
        where.append(router.route(RoutedRequest("r", tokens, 8)))
        router.end("r")
    assert where == [0, 1] * 4 + [0]
    assert (router.counters["prefix_matches"], router.counters["prefix_tokens_matched"]) == (1, 64)


class NoRouter:
    """No router."""

    def __init__(self, num_replicas: int) -> None:
        pass


def test_prefixes_need_a_cache_of_prefixes() -> None:
    with pytest.raises(BadInput, match="prefix_caching=true"):
        make_router(ParallelOptions(replicas=2, router="prefix_aware"), None)


@pytest.mark.parametrize("name", ["round_robin", "least_tokens", "session", "prefix_aware"])
def test_a_replica_leaves_with_its_requests_and_others_join(name: str) -> None:
    options = ParallelOptions(replicas=2, router=cast(Any, name))
    router = make_router(options, CacheShape(4, 100))
    prompt = list(range(9))
    for number in range(2):
        router.route(RoutedRequest(f"a{number}", [number] * 9))
    router.leave(0)
    assert [router.route(RoutedRequest(f"b{n}", prompt)) for n in range(3)] == [1] * 3
    router.join(2)  # the next after the last
    router.join(3)
    assert {router.route(RoutedRequest(f"c{n}", [n] * 9)) for n in range(9)} == {1, 2, 3}
    assert sum(router.given) == 14 and len(router.queued) == 4
    assert router.lose(0) == ["a0"] and router.alive == {1, 2, 3}
