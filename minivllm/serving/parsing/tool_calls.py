"""Tool calls, taken out of an answer's text while it comes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minivllm.serving.parsing.json_reader import (
    SPACE,
    Malformed,
    Reader,
    expect,
    literal,
    members,
    space,
    text_value,
    until,
    value,
)
from minivllm.serving.parsing.tool_forms import ToolForm
from minivllm.serving.parsing.xml_values import as_json

LONGEST_NAME = 256
MOST_SPACE = 64  # characters of it that are left out before a call
_CLOSING = SPACE + "}]"  # what a call that has begun may still lack
_KEYS = ("name", "arguments", "parameters", "id", "type")
# A name before its arguments, as the tokenizers of Mistral from version 11 on write it.
_NAMED = re.compile(r"([\w.-]+)[ \t\r\n]*(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?[ \t\r\n]*")
_NAME_CHARACTERS = re.compile(r"[\w.\-\[\] \t\r\n]")


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Text that is no tool call."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """A tool call begins; its number among the calls of the answer, its id and the tool's name."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of the JSON of a call's arguments, as the model writes it."""

    index: int
    text: str


ToolCallEvent = ContentDelta | ToolCallBegin | ArgumentsDelta


class ToolCallParser:
    """Takes the tool calls out of a text that comes in pieces.

    A call begins once its name and the first bracket of its arguments are known; its arguments go
    on as they come and are always the beginning of valid JSON. What looks like a call and is none
    is text, from its marker on, or from the first wrong character where the call has begun already;
    in a list behind a call, an object that calls no known tool is.
    Space around calls, their markers and the JSON around name and arguments are left out. How a
    text is cut into pieces changes nothing.

    Args:
        form: in which the model writes calls.
        tools: names, with the JSON schemas of their parameters; a call without a marker, or of the
            generic form, is only one where it names one of them.
    """

    def __init__(self, form: ToolForm, tools: Mapping[str, Any] | None = None) -> None:
        self.form, self.tools = form, tools or {}
        self.num_calls = 0
        self._events: list[ToolCallEvent] = []
        self._buffer = ""  # not read yet, as it may be the beginning of a marker
        self._section: Reader | None = None  # reads the calls behind a marker
        # Of a section: characters that are text if it turns out to be no call.
        self._held: list[str] = []
        self._marked = False  # has the section a marker
        self._in_call = self._has_begun = self._in_arguments = False
        self._trims = False  # the last event is a call: space at the beginning of text is left out
        self._at_start = True  # nothing but space has come

    def push(self, text: str) -> list[ToolCallEvent]:
        """The events of the next piece of the text."""
        self._buffer += text
        while self._buffer if self._section else self._open_section():
            self._read_section()
        return self._taken()

    def finish(self) -> list[ToolCallEvent]:
        """The text has ended: the events that are left. A call that has begun stays as it is."""
        held = "".join(self._held)
        if self._section is not None and self._in_call and held.strip(_CLOSING):
            self._content(held)
        self._section = None
        self._content(self._buffer)
        self._buffer = ""
        return self._taken()

    def _taken(self) -> list[ToolCallEvent]:
        events, self._events = self._events, []
        return events

    # ---- text

    def _content(self, text: str) -> None:
        text = text.lstrip(SPACE) if self._trims else text
        if text:
            self._trims = False
            self._events.append(ContentDelta(text))

    def _open_section(self) -> bool:
        """Pass text on up to a marker; whether one has come, or a call without one."""
        begin, text = self.form.begin, self._buffer
        if self._at_start and self.form.is_bare:
            rest = text.lstrip(SPACE)
            before = len(text) - len(rest)
            if not rest and before <= MOST_SPACE:
                return False
            if rest and rest[0] in "{[" and before <= MOST_SPACE:
                self._start(before, marked=False)
                return True
            self._at_start = False
        at = text.find(begin)
        if at >= 0:
            done = self._without_space(text[:at])
            self._content(done)
            self._buffer = text[len(done) :]
            self._start(at - len(done) + len(begin), marked=True)
            return True
        keep = min(len(begin) - 1, len(text))
        while not begin.startswith(text[len(text) - keep :]):
            keep -= 1
        done = self._without_space(text[: len(text) - keep])
        self._content(done)
        self._buffer = text[len(done) :]
        return False

    def _without_space(self, text: str) -> str:
        """A text without the space at its end that is left out before a call."""
        return text[: max(len(text.rstrip(SPACE)), len(text) - MOST_SPACE)]

    # ---- calls

    def _start(self, size: int, marked: bool) -> None:
        """Begin a section, with so many characters of the buffer before its first call."""
        self._held, self._buffer = list(self._buffer[:size]), self._buffer[size:]
        self._marked, self._at_start = marked, False
        self._in_call, self._has_begun = True, False
        self._section = self._read_calls()
        next(self._section)

    def _read_section(self) -> None:
        """Give the section the characters of the buffer, until it ends."""
        assert self._section is not None
        text, self._buffer = self._buffer, ""
        begin = 0  # of the arguments in this text
        for position, char in enumerate(text):
            was_in_arguments = self._in_arguments
            if not was_in_arguments:
                self._held.append(char)
            try:
                self._section.send(char)
            except StopIteration as end:
                self._arguments(text[begin : position + 1] if was_in_arguments else "")
                self._leave_section(end.value + text[position + 1 :])
                return
            except Malformed:
                if was_in_arguments:
                    self._arguments(text[begin:position])
                    self._held.append(char)
                self._give_back(text[position + 1 :])
                return
            if was_in_arguments and not self._in_arguments:
                self._arguments(text[begin : position + 1])
            elif self._in_arguments and not was_in_arguments:
                begin = position
        self._arguments(text[begin:] if self._in_arguments else "")

    def _leave_section(self, rest: str) -> None:
        """Go on with the text behind the section."""
        self._section, self._in_arguments, self._held = None, False, []
        self._buffer = rest

    def _give_back(self, rest: str) -> None:
        """Make text of what is no call. What comes behind a whole call, and the wrong character of
        a call, may be the beginning of a marker."""
        held = "".join(self._held)
        if self._in_call:
            self._trims = self._trims and not self._has_begun
            self._content(held[:-1])
            held = held[-1]
        self._leave_section(held + rest)

    def _arguments(self, text: str) -> None:
        if text:
            self._events.append(ArgumentsDelta(self.num_calls - 1, text))

    def _begin_call(self, name: str) -> None:
        self._events.append(ToolCallBegin(self.num_calls, self.form.new_id(), name))
        self.num_calls += 1
        self._held, self._has_begun, self._trims = [], True, True

    def _read_calls(self) -> Reader:
        """Read calls that share their markers; returns a character that is not theirs, if one was
        needed to see the end."""
        form = self.form
        char = yield from space((yield))
        is_list = char == "["
        if is_list:
            char = yield from space((yield))
        is_further = False
        while True:
            self._in_call, self._has_begun = True, False
            if form.has_names and char not in "{[":
                ahead = yield from self._read_named(char)
            elif form.is_xml and char == "<":
                ahead = yield from self._read_function()
            else:
                ahead = yield from self._read_object(char, is_further)
            self._in_call, self._held, is_further = False, list(ahead), True
            if not (is_list or form.end or form.separator):
                return ahead
            char = yield from space(ahead or (yield))
            if char != form.separator and not (is_list and char == ","):
                break
            char = yield from space((yield))
        if is_list:
            expect(char, "]")
            if not form.end:
                return ""
            char = yield from space((yield))
        if not form.end:
            return "".join(self._held)
        while char == "}":  # one too many, which small models write
            char = yield from space((yield))
        expect(char, form.end[0])
        return (yield from literal(form.end[1:]))

    def _read_named(self, char: str) -> Reader:
        """A name, and its arguments."""
        written = ""
        while char != "{":
            written += char
            if not _NAME_CHARACTERS.match(char) or len(written) > LONGEST_NAME:
                raise Malformed
            char = yield
        if not (found := _NAMED.fullmatch(written)):
            raise Malformed
        self._begin_call(found[1])
        return (yield from self._read_arguments())

    def _read_function(self) -> Reader:
        """A function with its parameters, as XML whose first `<` has come."""
        yield from literal("function=")
        name = yield from until(">", LONGEST_NAME)
        if not self._names_call(name):
            raise Malformed
        schema = self.tools.get(name)
        known = schema.get("properties") if isinstance(schema, Mapping) else None
        self._begin_call(name)
        self._arguments("{")
        between = ""
        expect((yield from space((yield))), "<")
        while (char := (yield)) != "/":
            expect(char, "p")
            yield from literal("arameter=")
            key = yield from until(">", LONGEST_NAME)
            text = yield from until("</parameter>")
            text = text.removeprefix("\n").removesuffix("\n")
            one = as_json(text, known.get(key) if isinstance(known, Mapping) else None)
            self._arguments(f"{between}{json.dumps(key, ensure_ascii=False)}: {one}")
            self._held, between = [], ", "
            expect((yield from space((yield))), "<")
        yield from literal("function>")
        self._arguments("}")
        return ""

    def _read_arguments(self) -> Reader:
        """The members of an object whose `{` has come, passed on as the arguments of the call."""
        self._in_arguments = True
        yield from members(1)
        self._in_arguments = False
        return ""

    def _read_object(self, char: str, is_further: bool) -> Reader:
        """A JSON object with a name and arguments. Where further ones share the markers of a call,
        one that is none is text by itself, without what stands around it."""
        expect(char, "{")
        begin, is_text = len(self._held) - 1, False
        name: str | None = None
        early: str | None = None  # arguments that came before the name
        char = yield from space((yield))
        while char == '"':
            key = yield from text_value()
            # `parameters` beside a name are a description of a tool where the prompt has such ones.
            if key not in _KEYS or (key == "parameters" and self.form.is_generic):
                raise Malformed
            expect((yield from space((yield))), ":")
            char, ahead = (yield from space((yield))), ""
            if key in ("arguments", "parameters"):
                expect(char, "{")
                if self._has_begun or early is not None:
                    raise Malformed
                if name is None or is_text:
                    start = len(self._held) - 1
                    yield from members(1)
                    early = "".join(self._held[start:])
                else:
                    self._begin_call(name)
                    yield from self._read_arguments()
            elif key == "name":
                expect(char, '"')
                name = yield from text_value()
                is_text = is_further and not self._names_call(name)
                if self._has_begun or not (is_text or self._names_call(name)):
                    raise Malformed
            else:
                ahead = yield from value(char, 1)
            char = yield from space(ahead or (yield))
            if char != ",":
                break
            char = yield from space((yield))
            expect(char, '"')
        if self._has_begun:
            return "" if char == "}" else char  # the last bracket may be missing
        expect(char, "}")
        if name is None:
            raise Malformed
        if is_text:
            self._content("".join(self._held[begin:]))
            return ""
        self._begin_call(name)
        self._arguments(early or "{}")
        return ""

    def _names_call(self, name: str) -> bool:
        """Whether a call may have this name."""
        known = name in self.tools or (self._marked and not self.form.is_generic)
        return known and name.isprintable() and 0 < len(name) <= LONGEST_NAME
