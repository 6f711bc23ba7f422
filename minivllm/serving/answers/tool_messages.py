"""Tools and their calls in messages, for chat templates that have no other place for them.

Phi-4-mini's template takes tools as a text of the system message, and knows no calls of earlier
turns; others take tools as a variable, and calls with their messages."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from minivllm.serving.parsing.tool_forms import ToolForm

# As the card of Phi-4-mini has it.
SYSTEM = "You are a helpful assistant with some tools."
_KEY = re.compile(r"""\[\s*['"]tools['"]\s*\]|\.tools\b""")
_VARIABLE = re.compile(r"""(?<![\w.'"])tools(?![\w'"])""")


def takes_tools_in_system(template: str) -> bool:
    """Whether a chat template takes tools as a key of a message, and not as a variable."""
    return bool(_KEY.search(template)) and not _VARIABLE.search(template)


def with_tools_in_system(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Messages whose first one, of the system, has the tools as JSON."""
    text = json.dumps([tool.get("function", tool) for tool in tools], ensure_ascii=False)
    first, rest = {"role": "system", "content": SYSTEM}, list(messages)
    if rest and rest[0]["role"] == "system":
        first = dict(rest.pop(0))
    return [{**first, "tools": text}, *map(dict, rest)]


def with_calls_in_content(
    messages: Sequence[Mapping[str, Any]], form: ToolForm
) -> list[dict[str, Any]]:
    """Messages whose calls are a part of their texts, as the model has written them."""
    result = []
    for message in messages:
        one = dict(message)
        for call in one.pop("tool_calls", ()):
            function = call.get("function", {})
            written = {
                "name": function.get("name"),
                form.arguments_key: function.get("arguments", {}),
            }
            text = json.dumps(written, ensure_ascii=False)
            whole = form.before + text + form.after
            # a content with images is a list of parts
            parts = isinstance(one["content"], list)
            one["content"] = one["content"] + (
                [{"type": "text", "text": whole}] if parts else whole
            )
        result.append(one)
    return result
