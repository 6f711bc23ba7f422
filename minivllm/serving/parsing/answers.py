"""Answers taken apart as they come: thoughts first, then text and tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minivllm.serving.parsing.reasoning import ThinkingSplitter
from minivllm.serving.parsing.tool_calls import (
    ArgumentsDelta,
    ContentDelta,
    ToolCallBegin,
    ToolCallEvent,
    ToolCallParser,
)
from minivllm.serving.parsing.tool_forms import ToolForm


@dataclass(frozen=True, slots=True)
class ThinkingDelta:
    """More of what the model thinks before it answers."""

    text: str


Event = ThinkingDelta | ToolCallEvent


class AnswerParser:
    """Takes an answer apart that comes in pieces. Tags are no part of any event.

    Args:
        thinking: whether the prompt has opened a thinking block, see `begins_thinking`.
        form: of tool calls; None takes none out of the text.
        tools: names, with the JSON schemas of their parameters.
        trims: leave out space at both ends of the thoughts, and behind them.
        most_calls: a further tool call and what comes behind it are left out; None: no limit.
    """

    def __init__(
        self,
        thinking: bool,
        form: ToolForm | None = None,
        tools: Mapping[str, Any] | None = None,
        trims: bool = False,
        most_calls: int | None = None,
    ) -> None:
        self._splitter = ThinkingSplitter(thinking, trims)
        self._most_calls, self._is_over = most_calls, False
        self._calls = None if form is None else ToolCallParser(form, tools)

    @property
    def is_thinking(self) -> bool:
        """Whether the text so far ends inside the thinking block."""
        return self._splitter.is_thinking

    @property
    def num_calls(self) -> int:
        """Tool calls that have begun."""
        return 0 if self._calls is None else self._calls.num_calls

    def push(self, text: str) -> list[Event]:
        """The events of the next piece of the answer."""
        return self._events(self._splitter.push(text))

    def finish(self) -> list[Event]:
        """The answer has ended: the events that are left."""
        events = self._events(self._splitter.finish())
        return events if self._calls is None else events + self._limited(self._calls.finish())

    def _events(self, pairs: list[tuple[bool, str]]) -> list[Event]:
        events: list[Event] = []
        for is_thinking, text in pairs:
            if is_thinking:
                events.append(ThinkingDelta(text))
            elif self._calls is None:
                events.append(ContentDelta(text))
            else:
                events += self._limited(self._calls.push(text))
        return events

    def _limited(self, events: list[ToolCallEvent]) -> list[Event]:
        """The events up to the first call too many."""
        result: list[Event] = []
        for event in events:
            too_many = isinstance(event, ToolCallBegin) and event.index == self._most_calls
            self._is_over = self._is_over or too_many
            if not self._is_over:
                result.append(event)
        return result


@dataclass
class ParsedCall:
    """A tool call of an answer; its arguments are JSON, as the model wrote it."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class ParsedAnswer:
    """An answer taken apart: the sum of its events."""

    thoughts: str = ""
    text: str = ""
    calls: list[ParsedCall] = field(default_factory=list)

    def add(self, events: Sequence[Event]) -> None:
        """Take the next events."""
        for event in events:
            match event:
                case ThinkingDelta(text):
                    self.thoughts += text
                case ContentDelta(text):
                    self.text += text
                case ToolCallBegin(_, call_id, name):
                    self.calls.append(ParsedCall(call_id, name))
                case ArgumentsDelta(index, text):
                    self.calls[index].arguments += text
