"""Grammars of clients, composed and compiled for trial in child processes: one that ends a child,
or takes it too long, does not reach the engine."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import fields
from typing import Any, NamedTuple

from minivllm.engine.options import StructuredOutputs
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.platform.processes.mortal import packed
from minivllm.serving.children.child_turns import ChildTurns, Work
from minivllm.serving.errors import ApiError
from minivllm.serving.openai.tools import Tools
from minivllm.serving.parsing.tool_forms import ToolForm

GRAMMARS = Work("minivllm.serving.children.grammar_child", "grammar", 5.0, 1 << 15)
MOST_KEPT, LARGEST_KEPT = 64, 1 << 20  # grammars that were right, and bytes of one


class GrammarRequest(NamedTuple):
    """What a client asks of the text of an answer.

    Args:
        form: see `answer_grammar`; without `is_chat` the text itself.
        is_chat: the answer may have thoughts and calls around the form.
    """

    form: StructuredOutputs | None
    is_chat: bool = False
    tools: Tools | None = None
    calls: ToolForm | None = None
    begins_thinking: bool = False
    field: str = ""


class GrammarChecks:
    """Whether grammars may go to the engine, as children find in turns.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._has_tokenizer = tokenizer is not None
        self.turns = ChildTurns(GRAMMARS, tokenizer)
        self._right: OrderedDict[bytes, StructuredOutputs | None] = OrderedDict()

    async def outputs(self, request: GrammarRequest, client: str) -> StructuredOutputs | None:
        """What the engine is to follow, which a child has compiled; None: any text.

        Args:
            request: of the client.
            client: whose turn it is.

        Raises:
            ApiError: it is wrong, or ended the child; or too many wait.
        """
        if not self._has_tokenizer:
            raise ApiError(
                400,
                "structured_outputs needs a tokenizer, and this checkpoint has none; use "
                "allowed_token_ids",
                param="structured_outputs",
            )
        question = packed(request)
        key = hashlib.sha256(question).digest()
        if key in self._right:
            self._right.move_to_end(key)
            return self._right[key]
        given = (await self.turns.answer(question, client, _param(request)))["outputs"]
        outputs = None if given is None else StructuredOutputs.of(given)
        if len(question) <= LARGEST_KEPT:
            self._right[key] = outputs
            while len(self._right) > MOST_KEPT:
                self._right.popitem(last=False)
        return outputs


def _param(request: GrammarRequest) -> str | None:
    """The parameter that asks for a grammar; None: several do."""
    if request.form is None:
        return "tools"
    return (
        f"structured_outputs.{'.'.join(given_of(request.form))}" if request.tools is None else None
    )


def given_of(outputs: StructuredOutputs) -> dict[str, Any]:
    """The field that is set."""
    values = {one.name: getattr(outputs, one.name) for one in fields(outputs)}
    return {name: value for name, value in values.items() if value not in (None, False)}
