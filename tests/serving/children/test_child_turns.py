"""Questions wait for their turn at processes that may die of them."""

from __future__ import annotations

import asyncio
import json
import queue
from typing import Any

import pytest

from minivllm.platform.processes.mortal import Died, TookTooLong
from minivllm.serving.children import child_turns
from minivllm.serving.children.child_turns import ChildTurns, Work, wrong
from minivllm.serving.errors import ApiError

WORK = Work("nothing", "thing", 5.0, 1000)


class Scripted:
    """A process that answers when a test lets it, and tells what it was asked."""

    def __init__(self) -> None:
        self.asked: queue.Queue[str] = queue.Queue()
        self.answers: queue.Queue[str] = queue.Queue()

    def ask(self, question: bytes, seconds: float) -> bytes:
        self.asked.put(question.decode())
        match self.answers.get(timeout=60):
            case "die":
                raise Died
            case "hang":
                raise TookTooLong
            case "wrong":
                return json.dumps(wrong("wrong", "field")).encode()
        return json.dumps({"question": question.decode()}).encode()

    def stop(self) -> None:
        pass


def turns_of(*processes: Scripted) -> ChildTurns:
    turns = ChildTurns(WORK, None)
    turns._free = list(processes)  # type: ignore[arg-type]
    return turns


def begin(turns: ChildTurns, question: str, client: str) -> asyncio.Task[dict[str, Any]]:
    return asyncio.ensure_future(turns.answer(question.encode(), client))


async def next_asked(process: Scripted) -> str:
    return (await asyncio.to_thread(process.asked.get, True, 60))[:2]


def test_each_client_has_its_turn_and_small_ones_go_first() -> None:
    async def run() -> list[str]:
        process = Scripted()
        turns = turns_of(process)
        order = []
        tasks = [begin(turns, "a0", "a")]
        order.append(await next_asked(process))
        names = [("a1" + "x" * 900, "a"), ("a2" + "x" * 300, "a"), ("b1" + "x" * 500, "b")]
        tasks += [begin(turns, *one) for one in (*names, ("b2", "b"), ("c1", "c"))]
        tasks[4].cancel()  # b2's client has left
        await asyncio.sleep(0)
        for _ in range(4):
            process.answers.put("right")
            order.append(await next_asked(process))
        process.answers.put("right")
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not turns._waiting and not turns._done
        return order

    assert asyncio.run(run()) == ["a0", "a2", "b1", "c1", "a1"]


def test_large_questions_leave_a_process_to_small_ones() -> None:
    async def run() -> None:
        first, second = Scripted(), Scripted()
        turns = turns_of(first, second)
        large = [begin(turns, f"l{number}" + "x" * WORK.large, "a") for number in range(2)]
        assert await next_asked(second) == "l0"
        small = begin(turns, "s0", "a")
        assert await next_asked(first) == "s0"
        first.answers.put("right")
        assert await small == {"question": "s0"}
        second.answers.put("right")
        await large[0]
        for process in (first, second):  # whichever has it
            process.answers.put("right")
        await large[1]

    asyncio.run(run())


def test_what_a_process_says_and_its_end_are_the_clients_errors() -> None:
    async def run() -> None:
        process = Scripted()
        turns = turns_of(process)
        words = {
            "die": "the thing takes more than 5 s, or more memory than it may: make it smaller",
            "hang": "the thing was not done within 60 s: make it smaller",
            "wrong": "wrong",
        }
        for said, message in words.items():
            process.answers.put(said)
            with pytest.raises(ApiError) as caught:
                await turns.answer(b"x", "a", "asked")
            error = caught.value
            assert (error.status, error.message) == (400, message)
            assert error.param == ("field" if said == "wrong" else "asked")

    asyncio.run(run())


@pytest.mark.parametrize(("name", "most"), [("MOST_WAITING", 1), ("MOST_WAITING_BYTES", 3)])
def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch, name: str, most: int) -> None:
    async def run() -> None:
        process = Scripted()
        turns = turns_of(process)
        monkeypatch.setattr(child_turns, name, most)
        waiting = [begin(turns, question, "a") for question in ("yyyy", "zzzz")]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="too many things wait") as caught:
            await begin(turns, "v", "b")
        assert (caught.value.status, caught.value.retry_after_s) == (429, 1)
        for _ in waiting:
            process.answers.put("right")
        await asyncio.gather(*waiting)

    asyncio.run(run())
