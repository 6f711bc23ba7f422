"""Grammars are tried in processes that may die of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minivllm.engine.options import StructuredOutputs
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.serving.children.child_turns import ChildTurns
from minivllm.serving.children.grammar_checks import GrammarChecks, GrammarRequest
from minivllm.serving.errors import ApiError
from minivllm.serving.openai.tools import Tools

CHOICE = GrammarRequest(StructuredOutputs(choice=("a", "b")))


def test_right_ones_are_kept() -> None:
    class Turns(ChildTurns):
        def __init__(self) -> None:
            self.count = 0

        async def answer(
            self, question: bytes, client: str, param: str | None = None
        ) -> dict[str, Any]:
            assert param == "structured_outputs.choice"
            self.count += 1
            return {"outputs": {"choice": ["a", "b"]}}

    async def run() -> None:
        checks = GrammarChecks(object())  # type: ignore[arg-type]
        checks.turns = turns = Turns()
        assert await checks.outputs(CHOICE, "a") == await checks.outputs(CHOICE, "b") == CHOICE.form
        assert turns.count == 1
        with pytest.raises(ApiError, match="needs a tokenizer"):
            await GrammarChecks(None).outputs(CHOICE, "a")

    asyncio.run(run())


class Deadly:
    """Ends the process that unpickles it, as a fault of a library would."""

    def __reduce__(self) -> Any:
        return os.abort, ()


@pytest.fixture
def real(chat_folder: Path) -> Iterator[GrammarChecks]:
    checks = GrammarChecks(Tokenizer.load(chat_folder))
    yield checks
    checks.turns.stop()


def test_a_child_dies_of_one_grammar_and_another_takes_the_next(real: GrammarChecks) -> None:
    async def run() -> None:
        tools = Tools([], "auto")
        for form, called, param in (
            (None, tools, "tools"),
            (CHOICE.form, None, "structured_outputs.choice"),
            (CHOICE.form, tools, None),
        ):
            request = GrammarRequest(form, True, called, field=Deadly())  # type: ignore[arg-type]
            with pytest.raises(ApiError, match="make it smaller") as caught:
                await real.outputs(request, "a")
            assert caught.value.param == param
        assert await real.outputs(CHOICE, "a") == CHOICE.form
        with pytest.raises(ApiError, match=r"structured_outputs\.regex"):
            await real.outputs(GrammarRequest(StructuredOutputs(regex="(")), "a")

    asyncio.run(run())
