"""The blocks of an answer, as events of a stream and as the content of a whole message."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from minivllm.serving.parsing.answers import Event, ThinkingDelta
from minivllm.serving.parsing.json_reader import completed
from minivllm.serving.parsing.tool_calls import ArgumentsDelta, ContentDelta, ToolCallBegin

PING: dict[str, Any] = {"type": "ping"}


class ContentBlocks:
    """Writes the events of an answer as Anthropic's, and keeps the content that they make up.

    Args:
        shows_thinking: thoughts that are not shown are blocks without text.
    """

    def __init__(self, shows_thinking: bool) -> None:
        self.content: list[dict[str, Any]] = []
        self._shows_thinking = shows_thinking
        self._written = ""  # thoughts or arguments of the block that is open
        self._open: str | None = None  # its type

    def add(self, events: Sequence[Event]) -> Iterator[dict[str, Any]]:
        """The events of the stream for the next ones of an answer."""
        for event in events:
            match event:
                case ThinkingDelta(text):
                    yield from self._require({"type": "thinking", "thinking": "", "signature": ""})
                    self._written += text
                    if self._shows_thinking:
                        self.content[-1]["thinking"] += text
                        yield self._delta({"type": "thinking_delta", "thinking": text})
                case ContentDelta(text):
                    yield from self._require({"type": "text", "text": ""})
                    self.content[-1]["text"] += text
                    yield self._delta({"type": "text_delta", "text": text})
                case ToolCallBegin(_, call_id, name):
                    yield from self.close()
                    call = {"id": call_id, "name": name, "input": {}, "caller": {"type": "direct"}}
                    yield from self._require({"type": "tool_use", **call})
                case ArgumentsDelta(_, text):
                    self._written += text
                    yield self._delta({"type": "input_json_delta", "partial_json": text})

    def close(self) -> Iterator[dict[str, Any]]:
        """End the block that is open."""
        if self._open == "thinking":
            # Anthropic's signatures are opaque; this one says which thoughts they were.
            signature = hashlib.sha256(self._written.encode(errors="replace")).hexdigest()
            self.content[-1]["signature"] = signature
            yield self._delta({"type": "signature_delta", "signature": signature})
        elif self._open == "tool_use":
            self.content[-1]["input"] = json.loads(completed(self._written))
        if self._open is not None:
            yield {"type": "content_block_stop", "index": len(self.content) - 1}
        self._open, self._written = None, ""

    def _require(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Begin a block, unless one of its type is open."""
        if self._open == block["type"]:
            return
        yield from self.close()
        self._open = block["type"]
        self.content.append(block)
        index = len(self.content) - 1
        yield {"type": "content_block_start", "index": index, "content_block": dict(block)}
        if index == 0:
            yield PING

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}
