"""Chat templates, rendered as transformers renders them (`apply_chat_template`)."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training; here it is the text alone."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render(template: str, messages: list[dict[str, str]], **variables: Any) -> str:
    """The text of a conversation. Raises whatever the template, which is somebody else's program, does."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.filters["tojson"] = _to_json  # jinja2's own is made for HTML
    known = {"tools": None, "documents": None, **variables}
    return environment.from_string(template).render(messages=messages, **known)


def _raise_exception(message: str) -> None:
    raise ValueError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)
