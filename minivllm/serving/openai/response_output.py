"""The output of /v1/responses: items, and the events that tell how they grow."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from minivllm.serving.http.answers import JsonEvent
from minivllm.serving.parsing.answers import Event, ThinkingDelta
from minivllm.serving.parsing.tool_calls import ArgumentsDelta, ContentDelta, ToolCallBegin


class ResponseOutput:
    """Items made of the events of an answer: thoughts, messages and calls in their order.

    Every method returns the events of a stream that say what has changed.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._is_open = False  # the last item still grows
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text has not come yet

    def add(self, events: Sequence[Event], logprobs: list[dict[str, Any]]) -> list[JsonEvent]:
        """Take the events of a piece of the answer.

        Args:
            events: of the parser.
            logprobs: of the tokens of this piece.
        """
        self._logprobs += logprobs
        found: list[JsonEvent] = []
        for event in events:
            match event:
                case ThinkingDelta(text):
                    found += self._grow_text("reasoning", text)
                case ContentDelta(text):
                    found += self._grow_text("message", text)
                case ToolCallBegin(_, call_id, name):
                    call = {"call_id": call_id, "name": name, "arguments": ""}
                    found += self._open("function_call", call)
                case ArgumentsDelta(_, text):
                    self.items[-1]["arguments"] += text
                    found.append(self._about("function_call_arguments.delta", delta=text))
        if events:
            self._logprobs = []
        return found

    def finish(self, is_whole: bool) -> list[JsonEvent]:
        """The answer has ended; one without any item gets an empty message.

        Args:
            is_whole: it has not been cut off.
        """
        found = [] if self.items else self._open("message", {"role": "assistant", "content": []})
        return found + self._close("completed" if is_whole else "incomplete")

    def _about(self, name: str, **fields: Any) -> JsonEvent:
        """An event about the last item."""
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": f"response.{name}", **place, **fields}

    def _open(self, kind: str, fields: dict[str, Any]) -> list[JsonEvent]:
        """Begin an item, after the end of the one before."""
        found = self._close("completed")
        prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind]
        head = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress"}
        self.items.append(head | fields)
        self._is_open = True
        found.append(self._whole_item("added"))
        if "content" in fields:
            self.items[-1]["content"] = [_part(kind)]
            found.append(self._about("content_part.added", content_index=0, part=_part(kind)))
        return found

    def _whole_item(self, name: str) -> JsonEvent:
        item = dict(self.items[-1])
        return {
            "type": f"response.output_item.{name}",
            "output_index": len(self.items) - 1,
            "item": item,
        }

    def _grow_text(self, kind: str, text: str) -> list[JsonEvent]:
        found: list[JsonEvent] = []
        if not self._is_open or self.items[-1]["type"] != kind:
            head: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            found += self._open(kind, {**head, "content": []})
        part = self.items[-1]["content"][0]
        part["text"] += text
        further: dict[str, Any] = {}
        if kind == "message":
            part["logprobs"] += self._logprobs
            further = {"logprobs": self._logprobs}
            self._logprobs = []
        return [
            *found,
            self._about(f"{part['type']}.delta", content_index=0, delta=text, **further),
        ]

    def _close(self, status: str) -> list[JsonEvent]:
        """End the last item."""
        if not self._is_open:
            return []
        self._is_open = False
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            found = [self._about("function_call_arguments.done", arguments=item["arguments"])]
        else:
            part = item["content"][0]
            further = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            done = f"{part['type']}.done"
            found = [
                self._about(done, content_index=0, text=part["text"], **further),
                self._about("content_part.done", content_index=0, part=part),
            ]
        return [*found, self._whole_item("done")]


def _part(kind: str) -> dict[str, Any]:
    """The empty part of an item."""
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
