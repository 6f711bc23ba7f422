"""Sessions in traces of single requests, by the names of their turns or by their hashes."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from minivllm.bench.workloads.agents.chats import read_chats
from minivllm.bench.workloads.agents.session import AgentSession, SessionReplay
from minivllm.errors import BadInput
from tests.bench.workloads.agents.recorded import write


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
