"""Sessions in weka's form: sub-agents, two ways of counting time, overlaps, and what is refused."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

from minivllm.bench.workloads.agents.session import AgentSession, SessionReplay
from minivllm.bench.workloads.agents.text import TextSpace
from minivllm.bench.workloads.agents.weka import WekaReader, is_weka
from minivllm.errors import BadInput
from tests.bench.workloads.agents.recorded import call, growing, subagent, weka


def read(row: dict[str, Any], shared: TextSpace | None = None, number: int = 1) -> AgentSession:
    return WekaReader(row, "f", TextSpace(number), shared or TextSpace(0)).read()


def waits(session: AgentSession) -> list[tuple[tuple[str, ...], tuple[float, ...]]]:
    return [(r.after, r.after_s) for r in SessionReplay(9, 0).requests(session, 0)[0]]


def test_prompts_and_answers_are_exactly_as_long_and_share_what_they_shared() -> None:
    session = read(weka([call(0, 150, 30, [1, 2]), call(9, 260, 5, [1, 2, 3, 4])]))
    assert [(c.prompt_len, c.output_len) for c in session.calls] == [(150, 30), (260, 5)]
    one, two = (list(chain.from_iterable(c.runs)) for c in session.calls)
    assert one[:128] == two[:128] and one[128:150] != two[128:150]
    # sent 7 s after the answer, which took 2 s
    assert waits(session)[1] == (("s0.0",), (7.0,))


def test_a_parent_waits_for_its_sub_agents_by_either_way_of_counting_time() -> None:
    inner = [call(0, 64, 3, [50], api=1.0), call(4, 128, 3, [50, 51], api=1.0)]
    within = weka([call(0, 64, 9, [1]), subagent(3, inner), call(9, 128, 9, [1, 2])])
    absolute = [call(3, 64, 3, [50], api=1.0), call(7, 128, 3, [50, 51], api=1.0)]
    without = weka([call(0, 64, 9, [1]), subagent(3, absolute), call(9, 128, 9, [1, 2])])
    for row in (within, without):
        session = read(row)
        assert [c.start_s for c in session.calls] == [0, 3, 7, 9]
        assert [c.agent for c in session.calls] == ["", "subagent 1", "subagent 1", ""]
        assert [after for after, _ in waits(session)] == [
            (),
            ("s0.0",),
            ("s0.1",),
            ("s0.0", "s0.2"),
        ]
        assert waits(session)[3][1] == (1.0, 1.0)  # the sub-agent ended at 8 s


def test_a_parent_that_went_on_too_early_goes_on_later() -> None:
    """By the times the parent's call is sent at 5 s, while its sub-agent works until 13 s."""
    inner = [call(0, 64, 3, [50], api=10.0)]
    row = weka(
        [
            call(0, 64, 9, [1]),
            subagent(3, inner),
            call(5, 128, 9, [1, 2]),
            call(9, 192, 9, [1, 2, 3]),
        ]
    )
    session = read(row)
    assert [c.start_s for c in session.calls] == [0, 3, 13, 17]
    assert waits(session)[2:] == [(("s0.0", "s0.1"), (0.0, 0.0)), (("s0.2",), (2.0,))]


def test_nobody_waits_for_a_background_agent() -> None:
    row = weka(
        [
            call(0, 64, 9, [1]),
            subagent(3, [call(0, 64, 3, [50])], status="async_launched"),
            call(9, 128, 9, [1, 2]),
        ]
    )
    assert [after for after, _ in waits(read(row))] == [(), ("s0.0",), ("s0.0",)]


def test_sub_agents_side_by_side_and_within_each_other() -> None:
    leaf = subagent(1, [call(0, 64, 3, [80], api=1.0)])
    row = weka(
        [
            call(0, 64, 9, [1]),
            subagent(3, [call(0, 64, 3, [50], api=1.0), leaf, call(5, 128, 3, [50, 51], api=1.0)]),
            subagent(3, [call(0, 64, 3, [60], api=2.0)]),
            call(20, 128, 9, [1, 2]),
        ]
    )
    session = read(row)
    names = [c.agent for c in session.calls]
    assert names == ["", "subagent 1", "subagent 2", "subagent 1/1", "subagent 1", ""]
    assert [after for after, _ in waits(session)] == [
        (),
        ("s0.0",),
        ("s0.0",),
        ("s0.1",),
        ("s0.1", "s0.3"),
        ("s0.0", "s0.4", "s0.2"),
    ]


def test_calls_that_overlapped_go_on_to_do_so() -> None:
    """The second is sent while the first is under way; the last waits for both."""
    row = weka(
        [
            call(0, 64, 9, [1]),
            call(5, 64, 9, [2], api=10.0),
            call(7, 64, 9, [3], api=2.0),
            call(30, 64, 9, [4]),
        ]
    )
    assert [after for after, _ in waits(read(row))] == [
        (),
        ("s0.0",),
        ("s0.0",),
        ("s0.1", "s0.2"),
    ]


def test_without_an_end_the_think_time_counts_and_else_the_starts() -> None:
    row = weka([call(0, 64, 9, [1], api=None), call(9, 64, 9, [2], api=None, think_time=4.0)])
    assert waits(read(row))[1] == (("s0.0",), (4.0,))
    row = weka([call(0, 64, 9, [1], api=None), call(9, 64, 9, [2], api=None)])
    assert waits(read(row))[1] == (("s0.0",), (9.0,))


def test_hashes_are_a_session_s_own_unless_they_are_global() -> None:
    for scope, same in (("local", False), ("global", True)):
        shared = TextSpace(0)
        row = weka([call(0, 64, 9, [1])], hash_id_scope=scope)
        one, two = (read(row, shared, number) for number in (1, 2))
        assert (one.calls[0].runs == two.calls[0].runs) is same


def test_hashes_have_no_upper_bound() -> None:
    one, two = read(weka([call(0, 64, 9, [2**64]), call(9, 128, 9, [2**64, 2**300])])).calls
    assert one.runs[0] == two.runs[0][:64] and two.prompt_len == 128


def test_what_is_left_out_is_counted() -> None:
    row = weka(
        [
            call(0, 64, 9, [1]),
            call(1, 0, 9, []),
            call(5, 70, 9, [], model="other"),
            subagent(6, []),
        ]
    )
    session = read(row)
    assert len(session.calls) == 2
    assert [note.split()[0] for note in session.notes] == ["1", "1", "1", "1"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (weka([call(0, 150, 9, [1])]), r"f: requests\[0\]: 150 prompt tokens are 3 blocks of 64"),
        (weka([call(-1, 64, 9, [1])]), r"requests\[0\]: t=-1 must be a number of at least 0"),
        (
            weka([call(10**400, 64, 9, [1])]),
            r"requests\[0\]: t=1000+\.\.\. must be a number of at least 0",
        ),
        (weka([call(0, 64, 9, ["a"])]), r"requests\[0\]: hash_ids must be a list"),  # type: ignore[list-item]
        (weka([{**call(0, 64, 9, [1]), "in": "64"}]), r"in='64' must be a whole number from 0"),
        (weka([{**call(0, 64, 9, [1]), "type": "x"}]), r"type='x' must be n, s or subagent"),
        (weka([3]), r"requests\[0\] must be an object"),  # type: ignore[list-item]
        (weka([]), r"holds no call"),
        (weka([call(0, 64, 9, [1])], block_size=0), r"f: block_size=0 must be"),
        (weka([call(0, 64, 9, [1])], block_size=2**31), r"f: block_size=2147483648 must be"),
        (weka([call(0, 64, 2**31, [1])]), r"requests\[0\]: out=2147483648 must be"),
        (weka([call(0, 2**31, 9, [])]), r"requests\[0\]: in=2147483648 must be"),
        (weka([call(0, 64, 9, [1])], tool_tokens=None), r"f: tool_tokens=None must be"),
        (weka([call(0, 64, 9, [1])], system_tokens=2**31), r"f: system_tokens=2147483648 must"),
        (weka([call(0, 64, 9, [-1])]), r"hash_ids must be a list of whole numbers of at least 0"),
        (weka([call(0, 64, 9, [1])], hash_id_scope="mine"), r"hash_id_scope='mine' must be local"),
        (weka([subagent(0, [call(0, 64, 9, [1], api=-2.0)])]), r"subagent 0: .*api_time=-2"),
        ({**weka([]), "requests": 5}, r"f: requests must be a list"),
    ],
)
def test_what_is_no_session_is_refused_in_one_line(row: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        read(row)
    assert "\n" not in str(caught.value)


def test_the_form_is_told_by_its_fields() -> None:
    assert is_weka(growing(2, 1, 1)) and not is_weka({"requests": []}) and not is_weka([1])
