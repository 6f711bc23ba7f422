"""Two engines and one prompt: what is shown, and how long the second engine lives."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Generator, Sequence

import pytest
from rich.console import Console

from minivllm import BadInput, SamplingParams
from minivllm.interactive.answer import Answer, AnswerPiece, collect
from minivllm.interactive.comparison import EngineComparison, first_difference
from minivllm.interactive.model import ChatDecoding, Turn
from minivllm.interactive.screen import Screen

TURN = Turn("hi")


class Model:
    """Answers with prepared text, and remembers what it was given."""

    name, form, is_base = "model", "bf16", False

    def __init__(self, text: str, params: SamplingParams, interrupted: bool = False) -> None:
        self.text, self.decoding, self.interrupted = text, ChatDecoding(params), interrupted
        self.asked: list[SamplingParams] = []
        self.is_closed = False

    def check(self, decoding: ChatDecoding) -> None:
        pass

    def answer(
        self,
        turn: Turn,
        decoding: ChatDecoding,
        show: Callable[[bool, str], None],
        watch: Callable[[Answer], None],
    ) -> Answer:
        self.asked.append(decoding.params)

        def pieces() -> Generator[AnswerPiece]:
            for character in self.text:
                yield AnswerPiece(character, 1, "stop")
            if self.interrupted:
                raise KeyboardInterrupt

        answer = Answer()
        collect(answer, pieces(), show, False, watch)
        return answer

    def cache_use(self) -> str:
        return ""

    def weights(self) -> str:
        return "weights 1.0 MB"

    def abort(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True


class Pairs:
    """A comparison of a first model with those of `texts`, in this order, on a screen."""

    def __init__(self, width: int, *texts: str, params: SamplingParams | None = None) -> None:
        self.params = SamplingParams()
        self.first = Model("<think>hm</think>one two three", self.params)
        self.built: list[Model] = []
        self.file = io.StringIO()
        self.texts = iter(texts)
        self.second_params = params or self.params
        console = Console(
            file=self.file, force_terminal=width > 0, width=width or 80, height=20, no_color=False
        )
        self.comparison = EngineComparison(self.first, self.prepare, Screen(console))

    def prepare(self, overrides: Sequence[str]) -> Callable[[], Model]:
        if "bad" in overrides:
            raise BadInput("bad is no override")
        return self.build

    def build(self) -> Model:
        self.built.append(Model(next(self.texts), self.second_params))
        return self.built[-1]

    def answer(self, params: SamplingParams | None = None) -> str:
        """What an answer adds to the screen."""
        before = len(self.file.getvalue())
        self.comparison.answer(TURN, ChatDecoding(params or self.params), True)
        return self.file.getvalue()[before:]


@pytest.mark.parametrize(
    ("one", "other", "at"),
    [("abc", "abc", None), ("abc", "abd", 2), ("ab", "abc", 2), ("", "a", 0), ("", "", None)],
)
def test_where_texts_first_differ(one: str, other: str, at: int | None) -> None:
    assert first_difference(one, other) == at


def test_texts_stand_below_each_other_where_there_is_no_room() -> None:
    pairs = Pairs(0, "one ten")
    pairs.comparison.use(["quant=nf4"])
    lines = pairs.answer().splitlines()
    assert lines[:4] == ["--- model · bf16", "hmone two three", "--- quant=nf4", "one ten"]
    assert lines[4].startswith("model · bf16 · 0 prompt tokens · 30 output tokens · ")
    assert lines[4].endswith(" · weights 1.0 MB") and lines[5].startswith("quant=nf4 · ")
    assert lines[6] == "the texts first differ at character 6 (of 13 and 7), after 'one t'"


def test_texts_stand_side_by_side_where_there_is() -> None:
    pairs = Pairs(120, "one ten")
    pairs.comparison.use(["quant=nf4"])
    shown = pairs.answer()
    rows = [line for line in shown.splitlines() if "one t" in line and "texts" not in line]
    assert "\x1b[33mwo three" in rows[-1] and "\x1b[33men" in rows[-1]
    plain = re.sub(r"\x1b\[[0-9;]*m", "", rows[-1])
    assert plain.split() == ["hmone", "two", "three", "one", "ten"]
    assert "the texts first differ at character 6" in shown


def test_the_second_engine_is_kept_while_its_overrides_are_the_same() -> None:
    pairs = Pairs(0, "a", "b", "c")
    comparison = pairs.comparison
    assert not comparison.is_on and comparison.describe() == "off"
    comparison.use(["quant=nf4"])
    comparison.use(["quant=nf4"])
    assert len(pairs.built) == 1
    with pytest.raises(BadInput):
        comparison.use(["bad"])
    assert comparison.describe() == "quant=nf4" and not pairs.built[0].is_closed
    comparison.use(["quant=int8"])
    assert pairs.built[0].is_closed and len(pairs.built) == 2
    comparison.off()
    assert pairs.built[1].is_closed and not comparison.is_on
    comparison.use(["quant=int8"])
    assert len(pairs.built) == 3


def test_an_engine_that_cannot_be_built_leaves_none() -> None:
    pairs = Pairs(0, "a")
    pairs.comparison.use(["quant=nf4"])
    pairs.build = lambda: pairs.prepare(["bad"])()  # type: ignore[method-assign]
    with pytest.raises(BadInput):
        pairs.comparison.use(["quant=int8"])
    assert not pairs.comparison.is_on and pairs.built[0].is_closed


def test_both_draw_with_one_seed_and_overrides_of_decoding_are_the_second_s() -> None:
    pairs = Pairs(0, "a", params=SamplingParams(temperature=0.5))
    pairs.comparison.use(["decoding.temperature=0.5"])
    pairs.answer(SamplingParams(max_tokens=7, temperature=0.9))
    pairs.answer(SamplingParams(max_tokens=7, temperature=0.9, seed=3))
    (one, two), (other, again) = pairs.first.asked, pairs.built[0].asked
    assert one.seed is not None and (one.seed, two.seed) == (other.seed, again.seed)
    assert two.seed == 3
    assert (one.temperature, other.temperature, other.max_tokens) == (0.9, 0.5, 7)


def test_ctrl_c_ends_the_comparison_of_a_turn() -> None:
    pairs = Pairs(0, "one")
    pairs.first.interrupted = True
    pairs.comparison.use(["quant=nf4"])
    shown = pairs.answer()
    assert "stopped" in shown and "the texts" not in shown and pairs.built[0].asked == []
