"""Why a request was slow: what it would not have had alone comes first."""

from __future__ import annotations

from typing import Any

import pytest

from minivllm.report.view.account import CAUSES, PARTS, Account
from minivllm.report.view.why import duration, parts, preempted_for, sentence, words
from tests.report.view.recording import START, named, states, step

STEP_S, TOKEN_S = 0.020, 0.001  # of the engine below: without tokens, and for each


def account_of(*items: dict[str, Any]) -> Account:
    return Account.of([START, *items])


def beside_prompts() -> Account:
    """A request that decodes 20 tokens, ten of them in steps with 200 tokens of another prompt."""
    items, now = list[dict[str, Any]](), 0.0
    for number in range(21):
        changes: dict[str, Any] = {"decoded": [0]} if number else {}
        count = 1
        if number == 0:
            changes |= {"new": [named(0, 0.0), named(1, 0.0)], "states": states((0, "decode"))}
            changes["scheduled"], count = [[0, 0, 6, "prefill"]], 6
        elif number > 10:
            changes["scheduled"], count = [[1, 200 * (number - 11), 200, "budget"]], 201
        if number == 20:
            changes["states"] = states((0, "done"))
        end = now + STEP_S + TOKEN_S * count
        items.append(step(number, now, end, **changes))
        now = end
    return account_of(*items)


def test_prompts_of_others_are_no_decoding_of_its_own() -> None:
    """Alone it would have taken 20 steps of 21 ms, and one of 26 for its prompt."""
    account = beside_prompts()
    life = account.lives[0]
    assert account.cost.ms_per_token == pytest.approx(1.0)
    assert parts(life, account) == pytest.approx({"prompts": 2000, "prefill": 26, "decode": 420})
    assert sum(parts(life, account).values()) == pytest.approx(1e3 * (life.end_s or 0.0))
    assert sentence(life, account) == (
        "Request 0 (r0) took 2.45 s, of which about 446 ms is its own. For 82 % of that (2.00 s) "
        "its steps took longer for 2,000 tokens of the prompts of other requests, in 10 steps. The "
        "rest: decode 17 %, prefill 1 %."
    )


def test_tokens_of_a_fast_step_bear_it_alike_so_that_its_own_always_has_a_share() -> None:
    """By the slope of such steps, others' tokens alone would take longer than this one did."""
    account = account_of(
        step(
            0,
            0.0,
            0.010,
            new=[named(0, 0.0), named(1, 0.0)],
            states=states((0, "decode")),
            decoded=[0],
            scheduled=[[1, 0, 9, "budget"]],
            sizes=[[0, 7, 7]],
        ),
        step(1, 0.010, 1.010, scheduled=[[1, 9, 99, "budget"]], states=states((0, "done"))),
    )
    life = account.lives[0]
    assert account.cost.ms_per_token > 10
    spent = parts(life, account)
    assert (spent["prompts"], spent["decode"]) == pytest.approx((9, 1))


def test_equal_steps_do_not_tell_what_a_token_takes() -> None:
    both = {"new": [named(0, 0.0), named(1, 0.0)], "states": states((0, "decode"), (1, "decode"))}
    account = account_of(
        step(0, 0.0, 0.010, decoded=[0, 1], **both), step(1, 0.010, 0.030, decoded=[0, 1])
    )
    assert parts(account.lives[0], account) == pytest.approx({"decode": 30})


def test_no_step_takes_longer_without_tokens_than_with_them() -> None:
    """A line that would be below 0 goes through 0; one that falls, says nothing of tokens."""
    account = Account()
    account.cost.add(1, 1.0)
    account.cost.add(10, 100.0)
    assert account.cost.ms_per_token == pytest.approx(1001 / 101)
    account = Account()
    account.cost.add(1, 50.0)
    account.cost.add(10, 10.0)
    assert account.cost.ms_per_token == 0


@pytest.mark.parametrize(
    ("needed_by", "said"),
    [
        ([], ""),
        ([5], " for request 5"),
        ([5, 7, 5], " for requests 5 and 7"),
        ([4, 5, 6], " for requests 5 and 6"),
        ([4], ", since it had no block to grow into,"),
    ],
)
def test_it_names_those_for_which_it_was_preempted(needed_by: list[int], said: str) -> None:
    assert preempted_for(4, needed_by) == said


def test_the_sentence_names_the_request_that_took_the_blocks() -> None:
    account = account_of(
        step(
            0,
            0.0,
            0.010,
            new=[named(0, 0.0)],
            states=states((0, "decode")),
            scheduled=[[0, 0, 6, "prefill"]],
        ),
        step(1, 0.010, 0.050, states=states((0, "preempted")), preempted=[[0, 5, False]]),
        step(2, 0.050, 0.060, states=states((0, "done")), decoded=[0]),
    )
    assert sentence(account.lives[0], account) == (
        "Request 0 (r0) took 60.0 ms, of which about 20.0 ms is its own. For 67 % of that (40.0 "
        "ms) it had been preempted once for request 5 and waited to start again. The rest: prefill "
        "17 %, decode 17 %."
    )


def test_a_sentence_begins_with_a_cause_however_long_its_own_work_took() -> None:
    account = account_of(
        step(
            0,
            0.0,
            0.25,
            new=[named(0, 0.0)],
            states=states((0, "waiting")),
            held=[0, "seqs", 0, 1, 0],
        ),
        step(1, 0.25, 1.25, states=states((0, "done")), scheduled=[[0, 0, 6, "prefill"]]),
    )
    life = account.lives[0]
    assert sentence(life, account) == (
        "Request 0 (r0) took 1.25 s, of which about 1.00 s is its own. For 20 % of that (250 ms) "
        "it waited in the queue, because 2 requests ran already (batching.max_num_seqs). The rest: "
        "prefill 80 %."
    )
    assert list(parts(life, account, client_ms=2.0)) == ["client", "queued", "prefill"]
    alone = account_of(
        step(0, 0.0, 1.0, new=[named(0, 0.0)], scheduled=[[0, 0, 6, "prefill"]]),
    )
    text = sentence(alone.lives[0], alone, client_ms=9000.0)
    assert "so far. For 90 % of that (9.00 s) it had not reached the engine. " in text


def test_every_part_has_its_words() -> None:
    texts = words()
    assert list(texts["parts"]) == list(texts["because"]) == list(PARTS)
    assert set(CAUSES) < set(PARTS)


def test_times_have_about_three_digits() -> None:
    assert [duration(ms) for ms in (0.125, 9.876, 12.34, 123.5, 2345)] == [
        "0.13 ms",
        "9.88 ms",
        "12.3 ms",
        "124 ms",
        "2.35 s",
    ]
