"""Chat templates, rendered as transformers renders them (`apply_chat_template`), in a process of
their own.

A template is a program of the checkpoint's author. Jinja's sandbox denies it files and attributes,
but does not limit its memory or time, so it runs in a child process with limits of both. The first
template starts the child, which serves all further ones."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from contextlib import suppress
from datetime import datetime
from functools import cache
from typing import Any

from minivllm.errors import BadInput, first_line
from minivllm.platform.processes.mortal import (
    LONGEST,
    Died,
    MortalProcess,
    TookTooLong,
    limit_memory,
)
from minivllm.platform.untrusted import size

SECONDS = 10.0  # for one conversation
MEMORY = 1 << 30  # bytes of the child's address space


@cache
def _renderer(pid: int) -> MortalProcess:
    return MortalProcess(__name__)


def render(template: str, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
    """The text of a conversation.

    Args:
        template: Jinja source.
        messages: of the conversation, values that JSON has.
        variables: what else the template may use.

    Raises:
        BadInput: the template rejects the conversation, takes too long or too much memory; or a
            value is none of JSON's.
    """
    known = {"tools": None, "documents": None, **variables, "messages": messages}
    try:
        question = json.dumps([template, known])
    except (TypeError, ValueError, RecursionError) as error:
        raise BadInput(f"a conversation must be made of JSON's values ({error})") from None
    return str(_ask(question, "rejects this conversation")["text"])


@cache
def variables_of(template: str) -> frozenset[str]:
    """The variables that a template reads and does not set; functions are none of them.

    Raises:
        BadInput: the template is wrong.
    """
    return frozenset(_ask(json.dumps([template, None]), "is wrong")["variables"])


def _ask(question: str, what: str) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = json.loads(_renderer(os.getpid()).ask(question.encode(), SECONDS))
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
    if "error" in answer:
        raise BadInput(f"the chat template {what}: {answer['error']}")
    return answer


def _environment() -> Any:
    """The environment that renders templates. Only the child imports jinja2."""
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what the assistant said, for training; here it is the text
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


def _serve() -> None:
    """The child: a line of JSON in, [template, variables]; a line out, {"text": ...} or {"error":
    ...}. Without variables the answer is {"variables": [those that the template reads]}."""
    from jinja2.meta import find_undeclared_variables

    limit_memory(MEMORY)
    environment = _environment()
    compiled = cache(environment.from_string)
    for line in sys.stdin.buffer:
        answer: dict[str, Any]
        try:
            template, variables = json.loads(line)
            signal.alarm(math.ceil(SECONDS) + 5)  # if the parent is gone
            if variables is None:
                read = find_undeclared_variables(environment.parse(template))
                answer = {"variables": sorted(read - environment.globals.keys())}
            else:
                answer = {"text": compiled(template).render(**variables)}
        except MemoryError:
            answer = {"error": f"it needs more than {size(MEMORY)} of memory"}
        except Exception as error:  # a template may raise any exception
            answer = {"error": first_line(error)[:500]}
        finally:
            signal.alarm(0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt, BrokenPipeError):
        _serve()
