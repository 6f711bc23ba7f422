"""The child process that composes and compiles grammars of clients, and may die of it."""

from __future__ import annotations

import base64
import dataclasses
import json
import pickle
import signal
import sys
from contextlib import suppress
from typing import Any

from minivllm.engine.options import StructuredOutputs
from minivllm.errors import BadInput, first_line
from minivllm.extras.masks.chains import STACK
from minivllm.extras.masks.compiling import compiled, guided_tokenizer
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.platform.processes.mortal import limit_memory
from minivllm.platform.threads import with_stack
from minivllm.serving.answers.answer_grammar import answer_grammar
from minivllm.serving.errors import ApiError
from minivllm.serving.processes.grammar_checks import CPU_SECONDS, Asked

MEMORY = 4 << 30  # bytes of the address space


class GrammarChild:
    """Answers what is asked with the tokenizer of a model.

    Raises:
        BadInput: llguidance is missing, or cannot use the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._guided = tokenizer, guided_tokenizer(tokenizer)

    def answer(self, asked: Asked) -> dict[str, Any]:
        """The grammar, or what is wrong with it."""
        try:
            # With half of the stack that the engine has for it.
            outputs = with_stack(STACK // 2, lambda: self._composed(asked))
            if outputs is not None:
                compiled(self._guided, outputs, STACK // 2)
        except ApiError as error:
            return {"error": [error.status, error.message, error.kind, error.param]}
        except BadInput as error:
            message = str(error).replace("decoding.", "")
            return {"error": [400, message, "invalid_request_error", None]}
        except (RecursionError, MemoryError) as error:
            return {"error": [400, first_line(error), "invalid_request_error", None]}
        return {"outputs": outputs and _given(outputs)}

    def _composed(self, asked: Asked) -> StructuredOutputs | None:
        if not asked.is_chat:
            return asked.form
        given = asked.form, asked.tools, asked.calls, self._tokenizer, asked.begins_thinking
        return answer_grammar(*given, asked.field)


def _given(outputs: StructuredOutputs) -> dict[str, Any]:
    """The field that is set."""
    values = {one.name: getattr(outputs, one.name) for one in dataclasses.fields(outputs)}
    return {name: value for name, value in values.items() if value not in (None, False)}


def _serve() -> None:
    """The child: a line in, the base64 of a pickled tokenizer or question; a line of JSON out."""
    limit_memory(MEMORY)
    child: GrammarChild | None = None
    error: dict[str, Any] | None = None  # of the tokenizer
    for line in sys.stdin.buffer:
        given = pickle.loads(base64.b64decode(line))
        answer: dict[str, Any] = {}
        if isinstance(given, Asked):
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # ends this process
            answer = error or (child.answer(given) if child else {})
            signal.setitimer(signal.ITIMER_PROF, 0)
        else:
            try:
                child = GrammarChild(given)
            except BadInput as wrong:
                words = str(wrong).replace("decoding.", "")
                error = {"error": [400, words, "invalid_request_error", None]}
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt, BrokenPipeError):
        _serve()
