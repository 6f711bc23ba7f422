"""Grammars wait for their turn at processes that may die of them."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minivllm.engine.options import StructuredOutputs
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.platform.processes.mortal import Died
from minivllm.serving.errors import ApiError
from minivllm.serving.processes import grammar_checks
from minivllm.serving.processes.grammar_checks import LARGE, Asked, GrammarChecks


class Scripted:
    """A process that answers when a test lets it, and tells what it was asked."""

    def __init__(self) -> None:
        self.asked: queue.Queue[str] = queue.Queue()
        self.answers: queue.Queue[str] = queue.Queue()

    def ask(self, question: bytes, seconds: float) -> bytes:
        regex = pickle.loads(base64.b64decode(question)).form.regex
        self.asked.put(regex)
        match self.answers.get(timeout=60):
            case "die":
                raise Died
            case "wrong":
                return json.dumps({"error": [400, "wrong", "kind", "field"]}).encode()
        return json.dumps({"outputs": {"regex": regex}}).encode()

    def stop(self) -> None:
        pass


def checks_of(*processes: Scripted) -> GrammarChecks:
    checks = GrammarChecks(object())  # type: ignore[arg-type]
    checks._free = list(processes)  # type: ignore[arg-type]
    return checks


def begin(checks: GrammarChecks, regex: str, client: str) -> asyncio.Task[Any]:
    asked = Asked(StructuredOutputs(regex=regex))
    return asyncio.ensure_future(checks.outputs(asked, client))


async def next_asked(process: Scripted) -> str:
    return (await asyncio.to_thread(process.asked.get, True, 60))[:2]


def test_each_client_has_its_turn_and_small_ones_go_first() -> None:
    async def run() -> list[str]:
        process = Scripted()
        checks = checks_of(process)
        order = []
        tasks = [begin(checks, "a0", "a")]
        order.append(await next_asked(process))
        names = [("a1" + "x" * 900, "a"), ("a2" + "x" * 300, "a"), ("b1" + "x" * 500, "b")]
        tasks += [begin(checks, *one) for one in (*names, ("b2", "b"), ("c1", "c"))]
        tasks[4].cancel()  # b2's client has left
        await asyncio.sleep(0)
        for _ in range(4):
            process.answers.put("right")
            order.append(await next_asked(process))
        process.answers.put("right")
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not checks._waiting and not checks._done
        return order

    assert asyncio.run(run()) == ["a0", "a2", "b1", "c1", "a1"]


def test_large_grammars_leave_a_process_to_small_ones() -> None:
    async def run() -> None:
        first, second = Scripted(), Scripted()
        checks = checks_of(first, second)
        large = [begin(checks, f"l{number}" + "x" * LARGE, "a") for number in range(2)]
        assert await next_asked(second) == "l0"
        small = begin(checks, "s0", "a")
        assert await next_asked(first) == "s0"
        first.answers.put("right")
        assert (await small).regex == "s0"
        second.answers.put("right")
        await large[0]
        for process in (first, second):  # whichever has it
            process.answers.put("right")
        await large[1]

    asyncio.run(run())


def test_the_end_of_a_process_is_the_clients_error_and_right_ones_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        process = Scripted()
        checks = checks_of(process)
        for said, message in (("die", "make it smaller"), ("wrong", "^wrong$")):
            process.answers.put(said)
            with pytest.raises(ApiError, match=message) as caught:
                await begin(checks, "x", "a")
            assert caught.value.status == 400
        process.answers.put("right")
        assert await begin(checks, "x", "a") == await begin(checks, "x", "b")
        monkeypatch.setattr(grammar_checks, "MOST_WAITING", 1)
        waiting = [begin(checks, regex, "a") for regex in ("y", "z")]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="too many grammars wait") as caught:
            await begin(checks, "v", "b")
        assert caught.value.status == 429
        for _ in waiting:
            process.answers.put("right")
        await asyncio.gather(*waiting)
        with pytest.raises(ApiError, match="needs a tokenizer"):
            await GrammarChecks(None).outputs(Asked(StructuredOutputs(regex="a")), "a")

    asyncio.run(run())


class Deadly:
    """Ends the process that unpickles it, as a fault of a library would."""

    def __reduce__(self) -> Any:
        return os.abort, ()


@pytest.fixture
def real(chat_folder: Path) -> Iterator[GrammarChecks]:
    checks = GrammarChecks(Tokenizer.load(chat_folder))
    yield checks
    checks.stop()


def test_a_child_dies_of_one_grammar_and_another_takes_the_next(real: GrammarChecks) -> None:
    async def run() -> None:
        with pytest.raises(ApiError, match="make it smaller"):
            await real.outputs(Asked(None, field=Deadly()), "a")  # type: ignore[arg-type]
        asked = Asked(StructuredOutputs(choice=("a", "b")))
        assert await real.outputs(asked, "a") == asked.form
        with pytest.raises(ApiError, match=r"structured_outputs\.regex"):
            await real.outputs(Asked(StructuredOutputs(regex="(")), "a")

    asyncio.run(run())
