"""Sessions in TensorRT-LLM's form: conversations, tools, branches, and what is refused."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

from minivllm.bench.workloads.agents.session import AgentSession, SessionReplay
from minivllm.bench.workloads.agents.tensorrt_llm import EventReader, is_events
from minivllm.bench.workloads.agents.text import TextSpace
from minivllm.errors import BadInput


def message(role: str, tokens: int | None, conversation: int = 0, **more: Any) -> dict[str, Any]:
    counted = {} if tokens is None else {"tokens": tokens}
    return {
        "event_type": "message",
        "role": role,
        "conversation_id": conversation,
        **counted,
        **more,
    }


def answer(completion: int, conversation: int = 0, **more: Any) -> dict[str, Any]:
    return message("assistant", None, conversation, completion_tokens=completion, **more)


def tool(ms: float, **more: Any) -> dict[str, Any]:
    return {"event_type": "tool_call", "tool_name": "search", "duration_ms": ms, **more}


def read(*events: Any, shared: TextSpace | None = None, number: int = 1) -> AgentSession:
    row = {"trace_id": "x", "events": list(events)}
    return EventReader(row, "f", TextSpace(number), shared or TextSpace(0)).read()


def waits(session: AgentSession) -> list[tuple[tuple[str, ...], tuple[float, ...]]]:
    return [(r.after, r.after_s) for r in SessionReplay(9, 0).requests(session, 0)[0]]


def positions(session: AgentSession, index: int) -> list[int]:
    return list(chain.from_iterable(session.calls[index].runs))


CHAT = (
    message("system", 50),
    message("user", 20),
    answer(8, reasoning_tokens=3),
    tool(1500),
    tool(500),
    message("tool", 30),
    answer(4),
)


def test_a_conversation_grows_by_what_is_said_but_for_the_reasoning() -> None:
    session = read(*CHAT)
    assert [(c.prompt_len, c.output_len) for c in session.calls] == [(70, 8), (105, 4)]
    assert positions(session, 1)[:70] == positions(session, 0)
    assert waits(session) == [((), ()), (("s0.0",), (2.0,))]


def test_branches_work_side_by_side_and_are_waited_for() -> None:
    def fork(i: int) -> list[dict[str, Any]]:
        return [
            message("user", 40, 10 + i, branch_path=[i]),
            answer(5, 10 + i, branch_path=[i]),
            tool(1000 * (i + 1), branch_path=[i]),
        ]

    session = read(
        *CHAT[:3],
        {"event_type": "parallel_start", "num_branches": 2},
        *fork(0),
        *fork(1),
        {"event_type": "parallel_end"},
        message("tool", 30),
        answer(4),
    )
    assert waits(session) == [
        ((), ()),
        (("s0.0",), (0.0,)),
        (("s0.0",), (0.0,)),
        (("s0.1", "s0.2"), (1.0, 2.0)),  # each branch ends with its tool
    ]


def test_a_branch_of_tools_alone_is_waited_for() -> None:
    session = read(
        *CHAT[:3],
        {"event_type": "parallel_start", "num_branches": 2},
        message("user", 40, 1, branch_path=[0]),
        answer(5, 1, branch_path=[0]),
        tool(9000, branch_path=[1]),
        {"event_type": "parallel_end"},
        answer(4),
    )
    assert waits(session)[2] == (("s0.0", "s0.1"), (9.0, 0.0))


def test_children_of_a_fork_are_branches_of_one_event() -> None:
    children = [
        message("assistant", None, i, completion_tokens=3, prompt_tokens=30) for i in (1, 2)
    ]
    session = read(*CHAT[:3], {"event_type": "parallel_start", "children": children}, answer(4))
    assert [c.prompt_len for c in session.calls] == [70, 30, 30, 75]
    assert waits(session)[3][0] == ("s0.1", "s0.2")


def test_named_system_prompts_are_shared_between_sessions() -> None:
    shared = TextSpace(0)
    events = (message("system", 50, system_prompt_id="planner"), message("user", 9), answer(3))
    one, two = (read(*events, shared=shared, number=n) for n in (1, 2))
    assert positions(one, 0)[:50] == positions(two, 0)[:50]
    assert positions(one, 0)[50:] != positions(two, 0)[50:]
    assert one.calls[0].shared_len == 50


def test_a_message_may_replace_an_earlier_one() -> None:
    session = read(*CHAT[:3], message("user", 10, message_index=1), answer(4))
    assert session.calls[1].prompt_len == 50 + 10 + 5
    assert positions(session, 1)[:50] == positions(session, 0)[:50]


def test_messages_without_a_count_are_counted_by_the_prompt() -> None:
    """Older files count them in another field, or not at all."""
    session = read(message("user", None, tokenize_count=12), answer(4))
    assert session.calls[0].prompt_len == 12
    session = read(
        message("user", None), answer(4, prompt_tokens=33), message("tool", 7), answer(1)
    )
    assert [c.prompt_len for c in session.calls] == [33, 44]
    with pytest.raises(BadInput, match=r"events\[1\]: prompt_tokens=None must be a whole number"):
        read(message("user", None), answer(4))


def test_other_events_are_counted() -> None:
    session = read(*CHAT, {"event_type": "drop_kv_cache"}, {"event_type": "weather"})
    assert [note.split()[0] for note in session.notes] == ["1", "1"]


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([], "events must be a list of at least one"),
        ([7], r"events\[0\] must be an object"),
        ([message("user", 3)], "hold no message of an assistant"),
        ([message("user", 3), answer(0)], r"events\[1\]: completion_tokens=0 must be"),
        ([message("user", -3)], r"events\[0\]: tokens=-3 must be a whole number"),
        ([message("robot", 3)], "role='robot' must be one of system"),
        ([{**message("user", 3), "conversation_id": None}], "must name a conversation"),
        ([{"event_type": "parallel_end"}], "has no parallel_start"),
        ([{"event_type": "parallel_start", "num_branches": 2}], "has no parallel_end"),
        ([{"event_type": "parallel_start", "num_branches": -1}], "num_branches=-1 must be"),
        ([tool(3, branch_path=[4])], r"branch_path=\[4\] is not open"),
        ([tool(3, branch_path=[[0]])], r"branch_path=\[\[0\]\] is not open"),
        ([{"event_type": "parallel_start", "children": [3]}], r"events\[0\].children\[0\] must be"),
        ([tool(-3)], "duration_ms=-3 must be a number of at least 0"),
        ([{**tool(3), "duration_ms": None}], "duration_ms=None must be a number of at least 0"),
        ([message("user", 2**31)], "tokens=2147483648 must be a whole number"),
        ([answer(2**31)], "completion_tokens=2147483648 must be a whole number"),
        ([answer(3, reasoning_tokens=2**31)], "reasoning_tokens=2147483648 must be a whole"),
        ([answer(3, prompt_tokens=2**31)], "prompt_tokens=2147483648 must be a whole number"),
        ([tool(10**400)], r"duration_ms=1000+\.\.\. must be a number of at least 0"),
    ],
)
def test_what_is_no_session_is_refused_in_one_line(events: list[Any], words: str) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        read(*events)
    assert str(caught.value).startswith("f: ") and "\n" not in str(caught.value)


def test_the_form_is_told_by_its_fields() -> None:
    assert is_events({"events": []}) and not is_events({"requests": []}) and not is_events([])
