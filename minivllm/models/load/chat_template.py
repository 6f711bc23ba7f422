"""Chat templates, rendered as transformers renders them (`apply_chat_template`), in a process of
their own.

A template is a program of the checkpoint's author. Jinja's sandbox denies it files and attributes,
but does not limit its memory or time, so it runs in a child process with limits of both. The first
template starts the child, which serves all further ones; a server has children of its own, which
take conversations of its clients in turns."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cache, partial
from typing import Any

from minivllm.errors import BadInput, first_line
from minivllm.models.load.messages import for_template, has_calls, with_known_roles
from minivllm.platform.processes.mortal import (
    LONGEST,
    Answers,
    Died,
    MortalProcess,
    TookTooLong,
    answer_lines,
    limit_memory,
    packed,
)
from minivllm.platform.untrusted import size

SECONDS = 10.0  # for one conversation
MEMORY = 1 << 30  # bytes of the child's address space


@cache
def _renderer(pid: int) -> MortalProcess:
    return MortalProcess(__name__, partial(packed, None))


@dataclass(frozen=True)
class Conversation:
    """A conversation on its way through a chat template.

    Attributes:
        question: for the child.
        continued: its messages, where the text ends with that of the last one.
    """

    question: bytes
    continued: Sequence[dict[str, Any]] | None = None

    @classmethod
    def of(
        cls,
        template: str,
        messages: list[dict[str, Any]],
        variables: dict[str, Any],
        continues: bool = False,
    ) -> Conversation:
        """One that is to be written. Tools of a template that takes none are texts of messages,
        and the role `developer` is `system` for a template that does not know it.

        Args:
            template: Jinja source.
            messages: of the conversation, values that JSON has; see `parse_messages`.
            variables: what else the template may use.
            continues: the text ends with the last message's.

        Raises:
            BadInput: a value is none of JSON's, or the tools are no functions.
        """
        known: dict[str, Any] = {"tools": None, "documents": None, **variables}
        fallback: list[Any] = []
        messages = with_known_roles(template, messages)
        if known["tools"] or has_calls(messages):
            from minivllm.models.load.tool_texts import tool_texts  # only these need it

            messages, known["tools"], shown, others = tool_texts(template, messages, known["tools"])
            if others is not None:
                fallback = [shown, for_template(template, others)]
        messages = for_template(template, messages)
        try:
            question = json.dumps([template, {**known, "messages": messages}, *fallback])
        except (TypeError, ValueError, RecursionError) as error:
            raise BadInput(f"a conversation must be made of JSON's values ({error})") from None
        return cls(packed(question), messages if continues else None)

    def text(self) -> str:
        """The text, which the child of this process writes.

        Raises:
            BadInput: the template rejects the conversation, takes too long or too much memory.
        """
        try:
            answer = json.loads(_renderer(os.getpid()).ask(self.question, SECONDS))
        except TookTooLong:
            raise BadInput(
                f"the chat template did not end within {SECONDS:g} s; use another checkpoint or "
                "template"
            ) from None
        except Died:
            raise BadInput(
                f"the chat template needs more than {size(MEMORY)} of memory or makes more than "
                f"{size(LONGEST)} of text; use another checkpoint or template"
            ) from None
        return self.text_of(answer)

    def text_of(self, answer: dict[str, Any]) -> str:
        """The text in a child's answer. Raises BadInput where the template rejects the
        conversation, or does not show what is to be continued."""
        if "fault" in answer:
            raise BadInput(f"the chat template rejects this conversation: {answer['fault']}")
        return answer["text"] if self.continued is None else _up_to(answer["text"], self.continued)


def _up_to(text: str, messages: Sequence[dict[str, Any]]) -> str:
    """A rendered conversation up to the end of its last message's text. Raises BadInput where it
    is not there."""
    content = messages[-1].get("content") if messages else None
    if isinstance(content, list):
        texts = [part["text"] for part in content if part.get("type") == "text"]
        content = texts[-1] if texts else None
    begin = text.rfind(content.strip()) if isinstance(content, str) and content.strip() else -1
    if not isinstance(content, str) or begin < 0:
        raise BadInput(
            "the last message has no text that the chat template shows: none to continue"
        )
    whole = begin + len(content.lstrip())  # with the space behind it, where the template keeps it
    is_whole = text[begin:whole] == content.lstrip()
    return text[: whole if is_whole else begin + len(content.strip())]


def variables_question(template: str) -> bytes:
    """The message to a child that finds the variables of a template."""
    return packed(json.dumps([template, None]))


def variables_of(answer: dict[str, Any]) -> frozenset[str]:
    """The variables that a template reads and does not set, in a child's answer; functions are
    none of them.

    Raises:
        BadInput: the template is wrong.
    """
    if "fault" in answer:
        raise BadInput(f"the chat template is wrong: {answer['fault']}")
    return frozenset(answer["variables"])


def _environment() -> Any:
    """The environment that renders templates. Only the child imports jinja2."""
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the turns of the assistant, for training; here it is the text
        alone."""

        tags = {"generation"}

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.filters["tojson"] = _to_json  # jinja2's own is made for HTML
    return environment


def _raise_exception(message: str) -> None:
    raise ValueError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)


def _rendered(render: Callable[..., str], fallback: list[Any]) -> str:
    """A conversation. With a `fallback` it shows a text in its first turn, which is the system's:
    where the template rejects or leaves out that turn, other messages are rendered."""
    if not fallback:
        return render()
    shown, others = fallback
    with suppress(Exception):  # a template may raise any exception
        if shown in (text := render()):
            return text
    return render(messages=others)


def _begin(_: None) -> Answers:
    """What answers `Conversation.question` with its text, and `variables_question`; {"fault": ...}
    says why not."""
    from jinja2.meta import find_undeclared_variables

    limit_memory(MEMORY)
    environment = _environment()
    compiled = cache(environment.from_string)

    def answer(question: str) -> dict[str, Any]:
        try:
            template, variables, *fallback = json.loads(question)
            if variables is not None:
                render = partial(compiled(template).render, **variables)
                return {"text": _rendered(render, fallback)}
            read = find_undeclared_variables(environment.parse(template))
            return {"variables": sorted(read - environment.globals.keys())}
        except MemoryError:
            return {"fault": f"it needs more than {size(MEMORY)} of memory"}
        except Exception as error:  # a template may raise any exception
            return {"fault": first_line(error)[:500]}

    return answer


if __name__ == "__main__":
    answer_lines(_begin, SECONDS)
