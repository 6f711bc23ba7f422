"""Chat templates, rendered as transformers renders them (`apply_chat_template`), in a process of
their own.

A template is a program of the checkpoint's author. Jinja's sandbox denies it files and attributes,
but does not limit its memory or time, so it runs in a child process with limits of both. The first
template starts the child, which serves all further ones."""

from __future__ import annotations

import atexit
import json
import math
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from datetime import datetime
from functools import cache
from selectors import EVENT_READ, DefaultSelector
from time import monotonic
from typing import Any

from minivllm.errors import BadInput, first_line
from minivllm.platform.processes.children import module_path
from minivllm.platform.untrusted import size

SECONDS = 10.0  # for one conversation
MEMORY = 1 << 30  # bytes of the child's address space
LONGEST = 64 << 20  # bytes of an answer


class _Renderer:
    """The child process and its pipes; one conversation at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.owner = os.getpid()  # a fork must not share the pipes
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, question: bytes) -> bytes:
        """Send a line, and return the answer. Raises BadInput if none comes in time."""
        with self.lock:
            if self.process is None:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", __name__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env={**os.environ, "PYTHONPATH": module_path()},
                    start_new_session=True,  # Ctrl-C ends an answer, not this
                )
            try:
                return self._exchange(self.process, question)
            except BaseException:
                self.stop()
                raise

    def _exchange(self, process: subprocess.Popen[bytes], question: bytes) -> bytes:
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.write(question + b"\n")
            process.stdin.flush()
        answer, deadline = bytearray(), monotonic() + SECONDS
        with DefaultSelector() as selector:
            selector.register(process.stdout, EVENT_READ)
            while not answer.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - monotonic())):
                    raise BadInput(
                        f"the chat template did not end within {SECONDS:g} s; use another "
                        "checkpoint or template"
                    )
                piece = os.read(process.stdout.fileno(), 1 << 20)
                answer += piece
                if not piece or len(answer) > LONGEST:
                    raise BadInput(
                        f"the chat template needs more than {size(MEMORY)} of memory or makes "
                        f"more than {size(LONGEST)} of text; use another checkpoint or template"
                    )
        return bytes(answer)

    def stop(self) -> None:
        """End the child process, if there is one. The next question starts another."""
        if self.process is not None and self.owner == os.getpid():
            process, self.process = self.process, None
            process.kill()
            process.communicate()


@cache
def _renderer(pid: int) -> _Renderer:
    renderer = _Renderer()
    atexit.register(renderer.stop)
    return renderer


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
    answer = json.loads(_renderer(os.getpid()).ask(question.encode()))
    if "error" in answer:
        raise BadInput(f"the chat template rejects this conversation: {answer['error']}")
    return answer["text"]


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
    ...}."""
    with suppress(ImportError, OSError, ValueError):  # some systems have no such limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    environment = _environment()
    compiled = cache(environment.from_string)
    for line in sys.stdin.buffer:
        answer: dict[str, str]
        try:
            template, variables = json.loads(line)
            signal.alarm(math.ceil(SECONDS) + 5)  # if the parent is gone
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
