"""Which form a file of sessions is in, and what is said of one that is in none."""

from __future__ import annotations

import json
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.bench.workloads.agents import files
from minivllm.bench.workloads.agents.files import read_chats
from minivllm.bench.workloads.agents.session import AgentSession, SessionReplay, without_long_gaps
from minivllm.errors import BadInput
from tests.bench.workloads.agents.recorded import call, growing, weka, write
from tests.damage import damaged


def read_sessions(path: Path, format: str, knob: str) -> list[AgentSession]:
    return list(files.read_sessions(path, format, knob))


EVENTS = {
    "trace_id": "x",
    "events": [
        {"event_type": "message", "role": "user", "conversation_id": 0, "tokens": 9},
        {
            "event_type": "message",
            "role": "assistant",
            "conversation_id": 0,
            "completion_tokens": 3,
        },
    ],
}
BAILIAN = {"chat_id": 1, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 16}
BAILIAN |= {"output_length": 2, "hash_ids": [1]}
MOONCAKE = {"timestamp": 27, "input_length": 500, "output_length": 2, "hash_ids": [1]}


@pytest.mark.parametrize(
    ("value", "format"),
    [
        (growing(2, 2, 1), "weka"),
        (EVENTS, "tensorrt_llm"),
        (BAILIAN, "bailian"),
        (MOONCAKE, "mooncake"),
    ],
)
def test_the_form_is_told_by_the_fields_or_by_its_name(
    value: object, format: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "t.jsonl", value, value)
    told, named = (read_sessions(path, name, "k") for name in ("auto", format))
    assert len(told) == 2 and told == named


def test_a_folder_has_a_session_a_file_and_a_value_may_have_many_lines(tmp_path: Path) -> None:
    for name in ("b", "a"):
        text = json.dumps(growing(3, 2, 1), indent=2)
        (tmp_path / f"{name}.json").write_text(text, encoding="utf-8")
    (tmp_path / "notes.txt").write_text("no session")
    sessions = read_sessions(tmp_path, "auto", "k")
    assert [Path(s.where).name for s in sessions] == ["a.json", "b.json"]
    assert sessions[0].calls[0].runs != sessions[1].calls[0].runs  # hashes are local
    assert read_sessions(tmp_path / "a.json", "auto", "k")[0].calls == sessions[0].calls


@pytest.mark.parametrize(
    ("lines", "format", "words"),
    [
        (['{"a": 1}'], "auto", r"t\.jsonl:1: not a session of an agent; a session is"),
        (["[1, 2]"], "auto", r"t\.jsonl:1: not a session"),
        (["{"], "auto", r"not valid JSON"),
        (
            [json.dumps(weka([call(0, 64, 3, [1])])), "{"],
            "auto",
            r"t\.jsonl:2: the line is not val",
        ),
        (
            [json.dumps(EVENTS)],
            "weka",
            r":1: workload\.format=weka needs .*requests and block_size",
        ),
        ([json.dumps(MOONCAKE)], "tensorrt_llm", r"tensorrt_llm needs a JSON object with events"),
        ([json.dumps(BAILIAN)], "mooncake", r"chat_id and parent_chat_id are columns of Bailian"),
        ([json.dumps(EVENTS)], "bailian", r"timestamp is missing"),
    ],
)
def test_what_is_in_no_form_or_another_is_refused_in_one_line(
    lines: list[str], format: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(BadInput, match=words) as caught:
        read_sessions(path, format, "workload.path=t.jsonl")
    assert "\n" not in str(caught.value)


def test_a_folder_without_sessions_and_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="k holds no session"):
        read_sessions(tmp_path, "auto", "k")
    with pytest.raises(BadInput, match="k: there is no such file"):
        read_sessions(tmp_path / "gone.json", "auto", "k")


FORMS = [json.dumps(value).encode() for value in (growing(3, 2, 1), EVENTS, BAILIAN, MOONCAKE)]


@pytest.mark.fuzz("recorded sessions")
@given(st.sampled_from(FORMS).flatmap(damaged))
def test_damaged_sessions_are_replayed_or_refused_in_one_line(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.jsonl"
        path.write_bytes(content)
        try:
            sessions = read_sessions(path, "auto", "k")
        except BadInput as error:
            assert "\n" not in str(error)
            return
        for session in sessions:
            requests, _ = SessionReplay(9, 0).requests(without_long_gaps(session, 10.0), 0)
            assert len(requests) == len(session.calls) > 0
            assert all(len(r.prompt_token_ids) and r.max_tokens > 0 for r in requests)
            known: set[str] = set()
            for request in requests:
                assert known.issuperset(request.after)
                known.add(request.request_id)


def test_names_of_files_are_shown_without_control_characters(tmp_path: Path) -> None:
    write(tmp_path / "\x1b]0;title\x07a.json", {"block_size": 4, "requests": 5})
    with pytest.raises(BadInput, match=r"/a\.json: requests must be a list") as caught:
        read_sessions(tmp_path, "auto", "k")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("depth", [40, 120, 490, 600, 5000])
@pytest.mark.parametrize(
    ("whole", "inner", "last"),
    [
        (
            '{"block_size": 4, "requests": [%s]}',
            '{"type": "subagent", "t": 0, "requests": [%s]}',
            '{"type": "n", "t": 0, "in": 3, "out": 2}',
        ),
        (
            '{"events": [%s]}',
            '{"event_type": "parallel_start", "children": [%s]}',
            json.dumps({**EVENTS["events"][1], "prompt_tokens": 5}),  # type: ignore[dict-item]
        ),
    ],
)
def test_agents_in_agents_are_replayed_or_refused_in_one_line(
    whole: str, inner: str, last: str, depth: int, tmp_path: Path
) -> None:
    text = last
    for _ in range(depth):
        text = inner % text
    path = tmp_path / "deep.json"
    path.write_text(whole % text)
    try:
        assert len(read_sessions(path, "auto", "k")) == 1 and depth == 40
    except BadInput as error:
        assert str(path) in str(error) and "\n" not in str(error) and depth > 40


def bailian(chat: int, parent: int, t: float, prompt: int, ids: list[int]) -> dict[str, Any]:
    return {
        "chat_id": chat,
        "parent_chat_id": parent,
        "timestamp": t,
        "input_length": prompt,
        "output_length": 7,
        "type": "text",
        "turn": 1,
        "hash_ids": ids,
    }


def mooncake(t: int, prompt: int, ids: list[int], output: int = 7) -> dict[str, Any]:
    return {"timestamp": t, "input_length": prompt, "output_length": output, "hash_ids": ids}


def starts(session: AgentSession) -> list[tuple[float, tuple[int, ...]]]:
    return [(call.start_s, call.after) for call in session.calls]


def positions(session: AgentSession, index: int) -> list[int]:
    return list(chain.from_iterable(session.calls[index].runs))


def test_turns_follow_the_one_that_they_name(tmp_path: Path) -> None:
    rows = [
        bailian(1, -1, 10.0, 32, [1, 2]),
        bailian(2, -1, 11.0, 16, [9]),
        bailian(3, 1, 14.5, 64, [1, 2, 3, 4]),
        bailian(4, 3, 20.0, 70, [1, 2, 3, 4, 5]),
        bailian(5, 99, 21.0, 16, [8]),  # the turn before is not in the file
    ]
    sessions = read_chats(write(tmp_path / "t.jsonl", *rows), "auto", "f")
    assert [starts(s) for s in sessions] == [
        [(0.0, ()), (4.5, (0,)), (10.0, (1,))],
        [(0.0, ())],
        [(0.0, ())],
    ]
    assert positions(sessions[0], 1)[:32] == positions(sessions[0], 0)
    assert len(positions(sessions[0], 2)) == 70
    assert [s.where for s in sessions] == ["f:1", "f:2", "f:5"]
    assert sessions[0].notes[0].startswith("2 calls follow others") and not sessions[1].notes
    requests, _ = SessionReplay(9, 0).requests(sessions[0], 0)
    assert [r.after_s for r in requests] == [(), (4.5,), (5.5,)]


def test_mooncake_s_prompts_follow_the_one_that_they_begin_with(tmp_path: Path) -> None:
    rows = [
        mooncake(0, 1100, [1, 2, 3]),
        mooncake(1000, 700, [1, 9]),  # the same first block, another session
        mooncake(4000, 1600, [1, 2, 4, 5]),  # begins with the two whole blocks of the first
        mooncake(6000, 1600, [1, 2, 4, 6]),  # and this with the three of that
        mooncake(7000, 300, [7]),  # no whole block
        mooncake(8000, 0, []),  # it failed
    ]
    sessions = read_chats(write(tmp_path / "t.jsonl", *rows), "mooncake", "f")
    assert [starts(s) for s in sessions] == [
        [(0.0, ()), (4.0, (0,)), (6.0, (1,))],
        [(0.0, ())],
        [(0.0, ())],
    ]
    assert positions(sessions[0], 1)[:1024] == positions(sessions[0], 0)[:1024]
    assert positions(sessions[0], 0)[:512] == positions(sessions[1], 0)[:512]
    assert sessions[0].notes[0].startswith("1 requests of the file were left out")


@pytest.mark.parametrize("wrong", [{"chat_id": [1]}, {"parent_chat_id": {}}])
def test_names_that_are_none_are_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", {**bailian(1, 2, 0.0, 16, [1]), **wrong})
    with pytest.raises(BadInput, match=r"f:1: .* is no name of a conversation"):
        read_chats(path, "auto", "f")


def test_hashes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", bailian(1, -1, 0.0, 64, [1, 2]))
    with pytest.raises(BadInput, match=r"f:1: 64 prompt tokens are 4 blocks of 16 tokens"):
        read_chats(path, "auto", "f")
