"""Answers taken apart as they come: thoughts first, then text and tool calls."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from minivllm.serving.parsing.reasoning import ThinkingSplitter
from minivllm.serving.parsing.tool_calls import ContentDelta, ToolCallEvent, ToolCallParser
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
        names: of the tools.
        trims: leave out space at both ends of the thoughts, and behind them.
    """

    def __init__(
        self,
        thinking: bool,
        form: ToolForm | None = None,
        names: Collection[str] = (),
        trims: bool = False,
    ) -> None:
        self._splitter = ThinkingSplitter(thinking, trims)
        self._calls = None if form is None else ToolCallParser(form, names)

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
        return events if self._calls is None else [*events, *self._calls.finish()]

    def _events(self, pairs: list[tuple[bool, str]]) -> list[Event]:
        events: list[Event] = []
        for is_thinking, text in pairs:
            if is_thinking:
                events.append(ThinkingDelta(text))
            elif self._calls is None:
                events.append(ContentDelta(text))
            else:
                events += self._calls.push(text)
        return events
