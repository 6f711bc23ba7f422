"""`TerminalChat`, a conversation and its commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import yaml

from minivllm.analysis.format import count
from minivllm.errors import BadInput, meant, nearest
from minivllm.interactive.answer import Answer
from minivllm.interactive.comparison import Build, EngineComparison, state
from minivllm.interactive.model import ChatDecoding, TerminalModel, Turn, picture_uri
from minivllm.interactive.screen import Screen

COMPARE = """\
/compare [k=v ...]  answer with a second engine, too: quant=nf4; off ends it
"""
HELP = """\
/reset              clear the conversation
/image PATH         show a picture with the next text, to a model that sees
/system [text]      show the system prompt, or set it and clear the conversation
/params [k=v ...]   show or change decoding, e.g. temperature=0.2 max_tokens=64
{compare}/stats              what has been generated so far, and how fast
/help               this list
/exit               leave (also /quit, Ctrl-D)
Alt-Enter, or a backslash at the end of a line, continues it on the next line.
Ctrl-C stops an answer."""


class TerminalChat:
    """A conversation and its commands.

    A base model (one without a chat template) completes every text by itself.

    Args:
        model: answers.
        screen: shows the answers, and notes about the conversation.
        build: makes the second engine of `/compare`; None where there is no engine here to
            compare with.
        system: the system prompt, or None.
        show_thinking: whether thinking blocks are shown.
    """

    def __init__(
        self,
        model: TerminalModel,
        screen: Screen,
        build: Build | None = None,
        system: str | None = None,
        show_thinking: bool = True,
    ) -> None:
        self.model = model
        self.system = system
        self.decoding = model.decoding
        self.messages: list[dict[str, Any]] = []
        self.answers: list[Answer] = []
        self._screen, self._show_thinking = screen, show_thinking
        self._comparison = None if build is None else EngineComparison(model, build, screen)
        self._last: Turn | None = None  # the last turn that was answered
        self._images: list[str] = []  # of the next turn
        self._what = self._status = f"{model.name} · {model.form}"

    def handle(self, text: str) -> bool:
        """Answer a text of the user, or run its command; returns False to end the conversation."""
        command, *rest = text.split(maxsplit=1) or [""]
        actions: dict[str, Callable[[str], object]] = {
            "/reset": self._reset,
            "/image": self._show_image,
            "/system": self._set_system,
            "/params": self._set_params,
            "/compare": self._compare,
            "/stats": self._show_stats,
            "/help": lambda _: self._screen.note(HELP.format(compare=self._offered(COMPARE))),
        }
        if command in ("/exit", "/quit"):
            return False
        if not command:
            return True
        try:
            if command in actions:
                actions[command](" ".join(rest).strip())
            elif re.fullmatch("/[a-z]+", text.strip()) or (
                command.startswith("/") and not self.model.is_base
            ):
                offered = [name for name in actions if name != "/compare" or self._offered(name)]
                question = meant(command, [*offered, "/exit", "/quit"])
                what = "; ".join(filter(None, (f"unknown command {command}", question)))
                self._screen.note(f"{what} (/help lists the commands)")
            else:
                self._take_turn(text)
        except BadInput as error:
            self._screen.note(f"error: {error}")
        return True

    def status(self) -> str:
        """What answers, and how the last answer went, in one line."""
        return self._status

    def abort(self) -> None:
        """Stop whatever is still running."""
        self.model.abort()
        if self._comparison is not None:
            self._comparison.abort()

    def close(self) -> None:
        """Free the engine of a comparison."""
        if self._comparison is not None:
            self._comparison.off()

    def _take_turn(self, text: str) -> None:
        turn = Turn(text, [*self.messages], self.system, tuple(self._images))
        self._images.clear()
        answer = self._answer(turn)
        self._last = turn
        if not self.model.is_base:
            self.messages += [turn.user, {"role": "assistant", "content": answer.text.strip()}]
        self.answers.append(answer)

    def _answer(self, turn: Turn) -> Answer:
        screen = self._screen
        if self._comparison is not None and self._comparison.is_on:
            answer, self._status = self._comparison.answer(turn, self.decoding, self._show_thinking)
            return answer

        def show(is_thought: bool, text: str) -> None:
            if self._show_thinking or not is_thought:
                screen.write(is_thought, text)

        def watch(answer: Answer) -> None:
            self._status = state(self._what, self.model, answer)
            screen.status(self._status)

        with screen.streaming():
            screen.status(self._what, now=True)
            answer = self.model.answer(turn, self.decoding, show, watch)
        screen.note(answer.summary())
        return answer

    def _compare(self, text: str) -> None:
        if self._comparison is None:
            raise BadInput(
                "/compare is for engines in this process, and task.url talks to a server: leave "
                "task.url out"
            )
        if text == "off":
            self._comparison.off()
        elif text:
            self._comparison.use(_words(text))
        if text in ("", "off") or self._last is None:
            self._screen.note(f"comparing: {self._comparison.describe()}")
        else:
            self._answer(self._last)

    def _offered(self, text: str) -> str:
        """The help for `/compare`; empty where it cannot be used."""
        return "" if self._comparison is None else text

    def _reset(self, _: str) -> None:
        self.messages.clear()
        self._images.clear()
        self._last = None
        self._screen.note("the conversation is cleared")

    def _show_image(self, path: str) -> None:
        if self.model.is_base:
            raise BadInput("a base model has no messages, which alone have a place for pictures")
        if not path:
            raise BadInput("/image needs the path of a picture")
        uri, (width, height) = picture_uri(path)
        self._images.append(uri)
        self._screen.note(f"{path} ({width} x {height} pixels) goes with the next text")

    def _set_system(self, text: str) -> None:
        if self.model.is_base:
            raise BadInput("a base model has no system prompt: it completes each text by itself")
        if text:
            self.system = text
            self.messages.clear()
        self._screen.note(f"system prompt: {self.system or '(none)'}")

    def _set_params(self, text: str) -> None:
        params = self.decoding.params
        known = sorted(item.name for item in fields(params))
        changes: dict[str, Any] = {}
        for part in text.split():
            name, sign, value = part.partition("=")
            if not sign or name not in known:
                raise BadInput(f"/params {part}: write name=value; {nearest(name, known)}")
            try:
                changes[name] = yaml.safe_load(value)
            except yaml.YAMLError:
                raise BadInput(f"/params {part}: {value!r} is no value") from None
        try:
            params = replace(params, **changes)
        except TypeError as error:
            raise BadInput(f"/params {text}: {error}") from error
        decoding = ChatDecoding(params, sorted({*self.decoding.given, *changes}))
        self.model.check(decoding)
        self.decoding = decoding
        self._screen.note(self._described_decoding())

    def _described_decoding(self) -> str:
        """The parameters that count: what a server is sent, or what an engine here gets beyond
        its defaults."""
        params, defaults = self.decoding.params, type(self.decoding.params)()
        first = ["max_tokens", "temperature"]
        given = self.decoding.given
        others = sorted(
            name
            for name in {item.name for item in fields(params)} - {*first}
            if name in given or getattr(params, name) != getattr(defaults, name)
        )
        names = first + others
        if self.model.decoding.given:  # it is a server
            names = [name for name in names if name in given]
        return "  ".join(f"{name}={getattr(params, name)}" for name in names)

    def _show_stats(self, _: str) -> None:
        if not self.answers:
            self._screen.note("nothing has been generated yet")
            return
        tokens = sum(answer.num_tokens for answer in self.answers)
        seconds = sum(answer.finished_s for answer in self.answers)
        parts = [
            f"{count(len(self.answers), 'answer')}, {count(tokens, 'token')} in {seconds:.1f} s "
            "of generating",
            self.model.cache_use(),
            self.model.weights(),
        ]
        self._screen.note("; ".join(filter(None, parts)))


def _words(text: str) -> list[str]:
    """The overrides of a command, split as a shell splits them."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise BadInput(f"/compare {text}: {error}") from None
