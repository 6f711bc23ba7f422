"""The child process that composes and compiles grammars of clients, and may die of it."""

from __future__ import annotations

from typing import Any

from minivllm.engine.options import StructuredOutputs
from minivllm.errors import BadInput, first_line
from minivllm.extras.masks.chains import STACK
from minivllm.extras.masks.compiling import compiled, guided_tokenizer
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.platform.processes.mortal import Answers, answer_lines, limit_memory
from minivllm.platform.threads import with_stack
from minivllm.serving.answers.answer_grammar import answer_grammar
from minivllm.serving.children.child_turns import wrong
from minivllm.serving.children.grammar_checks import GRAMMARS, GrammarRequest, given_of
from minivllm.serving.errors import ApiError

MEMORY = 4 << 30  # bytes of the address space


class GrammarChild:
    """Answers questions with the tokenizer of a model.

    Raises:
        BadInput: llguidance is missing, or cannot use the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._guided = tokenizer, guided_tokenizer(tokenizer)

    def answer(self, request: GrammarRequest) -> dict[str, Any]:
        """The grammar, or what is wrong with it."""
        try:
            # With half of the stack that the engine has for it.
            outputs = with_stack(STACK // 2, lambda: self._composed(request))
            if outputs is not None:
                compiled(self._guided, outputs, STACK // 2)
        except ApiError as error:
            return {"error": [error.status, error.message, error.kind, error.param]}
        except BadInput as error:
            return wrong(str(error))
        except (RecursionError, MemoryError) as error:
            return wrong(first_line(error))
        return {"outputs": outputs and given_of(outputs)}

    def _composed(self, request: GrammarRequest) -> StructuredOutputs | None:
        if not request.is_chat:
            return request.form
        given = request.form, request.tools, request.calls, self._tokenizer, request.begins_thinking
        return answer_grammar(*given, request.field)


def _begin(tokenizer: Tokenizer) -> Answers:
    """What answers with a tokenizer. One that is of no use is what is wrong with every grammar."""
    limit_memory(MEMORY)
    try:
        return GrammarChild(tokenizer).answer
    except BadInput as error:
        answer = wrong(str(error))
        return lambda request: answer


if __name__ == "__main__":
    answer_lines(_begin, GRAMMARS.cpu_seconds)
