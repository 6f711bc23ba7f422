"""The same prompt answered by two engines: `/compare` of the chat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace

from minivllm.interactive.answer import Answer
from minivllm.interactive.model import ChatDecoding, TerminalModel, Turn
from minivllm.interactive.screen import Screen
from minivllm.platform.untrusted import printable

# Checks overrides of the first engine's configuration, and returns what builds their engine.
Build = Callable[[Sequence[str]], Callable[[], TerminalModel]]
BEFORE = 24  # characters shown in front of a difference


class EngineComparison:
    """A second engine, which answers what the first one does; nothing until `use`.

    Args:
        first: the engine of the conversation.
        build: makes the second engine, see `Build`.
        screen: shows both answers.
    """

    def __init__(self, first: TerminalModel, build: Build, screen: Screen) -> None:
        self._first, self._build, self._screen = first, build, screen
        self._second: TerminalModel | None = None
        self._overrides: list[str] = []
        self._count = 0  # turns answered

    @property
    def is_on(self) -> bool:
        """Whether there is a second engine."""
        return self._second is not None

    def describe(self) -> str:
        """What is compared with the engine of the conversation."""
        return " ".join(self._overrides) if self.is_on else "off"

    def use(self, overrides: Sequence[str]) -> None:
        """Build the engine with these overrides, unless it is there already.

        Raises:
            BadInput: an override is wrong, and the engine so far is kept; or the new engine cannot
                be built, and there is none.
        """
        if self.is_on and self._overrides == [*overrides]:
            return
        make = self._build(overrides)
        self.off()  # before there are three
        self._second = make()
        self._overrides = [*overrides]

    def off(self) -> None:
        """Free the second engine."""
        if self._second is not None:
            self._second.close()
        self._second = None

    def abort(self) -> None:
        """Stop what the second engine still computes."""
        if self._second is not None:
            self._second.abort()

    def answer(self, turn: Turn, decoding: ChatDecoding, show_thinking: bool) -> tuple[Answer, str]:
        """Answer a turn with both engines, one after the other, and say how they differ.

        Args:
            turn, decoding: see TerminalModel; what the overrides say of decoding is the second
                engine's.
            show_thinking: whether thinking is shown.

        Returns:
            The first engine's answer, and its last `state`.

        Raises:
            BadInput: one of the engines cannot answer it.
        """
        assert self._second is not None
        self._count += 1
        if decoding.params.seed is None:  # both draw with the same noise
            decoding = replace(decoding, params=replace(decoding.params, seed=self._count))
        models = [self._first, self._second]
        decodings = [decoding, self._second_decoding(decoding)]
        headings = [f"{self._first.name} · {self._first.form}", self.describe()]
        states = [*headings]
        answers: list[Answer] = []
        with self._screen.pair(headings) as pair:

            def write(is_thought: bool, text: str) -> None:
                if show_thinking or not is_thought:
                    pair.write(is_thought, text)

            def watch(answer: Answer) -> None:
                states[index] = state(headings[index], models[index], answer)
                pair.status(states[index])

            for index, (model, one) in enumerate(zip(models, decodings, strict=True)):
                pair.begin(index)
                answers.append(model.answer(turn, one, write, watch))
                if answers[-1].finish_reason == "abort":
                    break
            texts = [printable(answer.text) for answer in answers]
            at = first_difference(*texts) if len(texts) == 2 else None
            if at is not None:
                pair.mark([len(text) - at for text in texts])
        for heading, model, answer in zip(headings, models, answers, strict=False):
            parts = (heading, answer.summary(), model.weights())
            self._screen.note(" · ".join(filter(None, parts)))
        if len(texts) == 2:
            self._screen.note(_verdict(texts, at))
        return answers[0], states[0]

    def _second_decoding(self, decoding: ChatDecoding) -> ChatDecoding:
        """The parameters of the conversation, but for those that the overrides change."""
        assert self._second is not None
        ours, theirs = self._first.decoding.params, self._second.decoding.params
        names = [one.name for one in fields(ours)]
        changed = {
            name: getattr(theirs, name)
            for name in names
            if getattr(theirs, name) != getattr(ours, name)
        }
        return replace(decoding, params=replace(decoding.params, **changed))


def state(what: str, model: TerminalModel, answer: Answer) -> str:
    """How an answer comes along, in one line.

    Args:
        what: the name of the model.
        model: answers.
        answer: so far.
    """
    return " · ".join(filter(None, (what, answer.rate, model.cache_use())))


def first_difference(one: str, other: str) -> int | None:
    """The first position at which two texts differ; None where they are the same."""
    if one == other:
        return None
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _verdict(texts: Sequence[str], at: int | None) -> str:
    """Whether two texts are the same, and where they first differ."""
    one, other = (f"{len(text):,}" for text in texts)
    if at is None:
        return f"the texts are the same ({one} characters)"
    before = texts[0][max(0, at - BEFORE) : at]
    after = f", after {before!r}" if before else ""
    return f"the texts first differ at character {at + 1:,} (of {one} and {other}){after}"
