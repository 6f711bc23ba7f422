"""Draft lengths against the best of all by hand, at little load and at much."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.extras.speculative.lengths import EXPLORE_EVERY, AdaptiveLengths, FixedLengths
from tests.extras.speculative.growing import request

LONGEST = 3


def bound_by_memory(num_tokens: int) -> float:
    """A step that reads weights, and computes in their shadow up to 8 tokens."""
    return max(8.0, float(num_tokens))


def free(count: int) -> float:
    return 0.0


def test_fixed_lengths_are_fixed() -> None:
    lengths = FixedLengths(2)
    requests = [request(), request()]
    lengths.note(requests[0], 2, 0)
    lengths.finished(requests[0])
    assert list(lengths.allot(requests, 500)) == [2, 2]


def taught(rates: list[float], count: int = 200) -> tuple[AdaptiveLengths, list[object]]:
    lengths = AdaptiveLengths(LONGEST, bound_by_memory, free)
    requests = [request() for _ in rates]
    for index in range(count):
        for one, rate in zip(requests, rates, strict=True):
            # drafts of one token, of which the share `rate` is right
            lengths.note(one, 1, int(index * rate) != int((index + 1) * rate))
    return lengths, requests  # type: ignore[return-value]


def test_drafts_grow_with_acceptance_and_shrink_with_load() -> None:
    lengths, requests = taught([0.9])
    assert list(lengths.allot(requests, 1)) == [3]  # type: ignore[arg-type]
    assert list(lengths.allot(requests, 100)) == [3]  # type: ignore[arg-type]  # beside a prompt
    busy, many = taught([0.9] * 20)
    assert not any(busy.allot(many, 20))  # type: ignore[arg-type]
    hostile, same = taught([0.0] * 3)
    assert not any(hostile.allot(same, 8))  # type: ignore[arg-type]


def test_places_go_to_the_requests_that_foresee_best() -> None:
    lengths, requests = taught([0.95, 0.1])
    assert list(lengths.allot(requests, 6)) == [3, 0]  # type: ignore[arg-type]


def test_no_drafts_pay_where_drafting_costs_more_than_it_saves() -> None:
    requests = [request()]
    for draft_ms, expected in ((0.0, LONGEST), (100.0, 0)):
        lengths = AdaptiveLengths(LONGEST, bound_by_memory, lambda _, ms=draft_ms: ms)
        lengths.drafted([1], draft_ms)
        assert list(lengths.allot(requests, 1)) == [expected]


def test_a_model_s_first_draft_is_one_request_s_and_says_what_drafting_takes() -> None:
    requests = [request() for _ in range(4)]
    lengths = AdaptiveLengths(LONGEST, bound_by_memory, lambda count: 0.1)
    assert sorted(lengths.allot(requests, 4)) == [0, 0, 0, LONGEST]
    lengths.drafted([LONGEST], LONGEST * 0.1 * 500)
    assert not any(lengths.allot(requests, 4)), "it takes 500 times what the model's step does"


def test_a_draft_that_takes_long_is_tried_as_rarely_as_its_time_says() -> None:
    lengths = AdaptiveLengths(LONGEST, lambda num_tokens: 1.0, lambda count: 1.0)
    requests = [request()]
    lengths.drafted([1], 2.0)  # two steps for one draft token
    tried = [any(lengths.allot(requests, 1)) for _ in range(3 * 600)]
    assert tried.count(True) == 3, "3 tokens are 6 steps, which is 1 % of 600"


def test_one_time_that_is_out_of_the_ordinary_does_not_count() -> None:
    lengths = AdaptiveLengths(LONGEST, bound_by_memory, lambda count: 1.0)
    requests = [request()]
    for milliseconds in (2.0, 500.0, 2.0):  # the second reads a prompt first
        lengths.drafted([2], milliseconds)
    assert list(lengths.allot(requests, 1)) == [LONGEST]


def test_after_some_steps_without_drafts_one_request_tries() -> None:
    lengths, requests = taught([0.0, 0.0])
    tried = [list(lengths.allot(requests, 100)) for _ in range(4 * EXPLORE_EVERY)]  # type: ignore[arg-type]
    drafting = [one for one in tried if any(one)]
    assert len(drafting) == 4
    assert drafting[0] != drafting[1] and {sum(one) for one in drafting} == {LONGEST}


def test_a_request_that_ends_leaves_nothing() -> None:
    lengths, requests = taught([0.5, 0.5])
    first, second = requests
    before = lengths.rate(second)  # type: ignore[arg-type]
    lengths.finished(first)  # type: ignore[arg-type]
    lengths.finished(request())
    assert list(lengths._of_request) == [second]
    assert lengths.rate(second) == before  # type: ignore[arg-type]
    assert lengths.rate(request()) == pytest.approx(0.5, abs=0.1), "a new one begins as all others"


@settings(max_examples=60)
@given(
    rates=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=3),
    others=st.integers(0, 12),
    knee=st.integers(1, 12),
    slope=st.floats(0.05, 2.0),
)
def test_no_other_lengths_give_more(
    rates: list[float], others: int, knee: int, slope: float
) -> None:
    """Of all lengths, where a step takes longer in proportion to its tokens beyond some number."""

    def step_ms(num_tokens: int) -> float:
        return 1.0 + slope * max(0, num_tokens - knee)

    lengths = AdaptiveLengths(LONGEST, step_ms, free)
    requests = [request() for _ in rates]
    for one, rate in zip(requests, rates, strict=True):
        lengths._of_request[one] = 1e9, 1e9 * rate
    num_tokens = len(rates) + others

    def goodput(chosen: tuple[int, ...]) -> float:
        survivors = sum(
            rate ** (place + 1)
            for rate, length in zip(rates, chosen, strict=True)
            for place in range(length)
        )
        return (len(rates) + survivors) / step_ms(num_tokens + sum(chosen))

    found = tuple(lengths.allot(requests, num_tokens))
    best = max(map(goodput, itertools.product(range(LONGEST + 1), repeat=len(rates))))
    assert goodput(found) == pytest.approx(best, rel=1e-6)


def test_drafting_that_takes_longer_than_the_model_alone_is_noticed() -> None:
    lengths = AdaptiveLengths(LONGEST, bound_by_memory, lambda count: 1.0)
    requests = [request()]
    for _ in range(100):
        lengths.note(requests[0], 1, 1)
    assert list(lengths.allot(requests, 1)) == [3]
    for _ in range(100):
        lengths.drafted([2], 2 * 20.0)  # 20 ms a token, which no token is worth
    assert list(lengths.allot(requests, 1)) == [0]


def test_steps_with_drafts_that_take_longer_than_their_tokens_are_noticed() -> None:
    """Such as by the draws of their rows."""
    lengths, requests = taught([0.6])
    assert any(lengths.allot(requests, 1))  # type: ignore[arg-type]
    for _ in range(100):
        lengths.stepped(4, True, 40.0)  # five times a step without drafts
        lengths.stepped(1, False, 8.0)
    assert not any(lengths.allot(requests, 1))  # type: ignore[arg-type]
    for _ in range(100):
        lengths.stepped(4, True, 8.0)
        lengths.stepped(1, False, 8.0)
    assert any(lengths.allot(requests, 1))  # type: ignore[arg-type]


def test_a_step_without_drafts_is_taken_to_compare_with() -> None:
    lengths, requests = taught([0.9])
    drafted = []
    for _ in range(200):
        longest = max(lengths.allot(requests, 1))  # type: ignore[arg-type]
        lengths.stepped(1 + longest, longest > 0, 8.0)
        drafted.append(longest > 0)
    assert drafted[:3] == [True, False, True]
    assert drafted.count(False) == 4  # the first, and one in 64
