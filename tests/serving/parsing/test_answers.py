"""Thoughts, text and calls of one answer, in any pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.serving.parsing.answers import AnswerParser, ThinkingDelta
from minivllm.serving.parsing.tool_calls import ArgumentsDelta, ContentDelta, ToolCallBegin
from minivllm.serving.parsing.tool_forms import HERMES, ToolForm

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
ANSWER = f"<think>\nI call <tool_call>.\n</think>\n\nWell.\n{CALL}"


def parse(
    pieces: list[str], thinking: bool, form: ToolForm | None, trims: bool
) -> tuple[str, str, list[str]]:
    """Thoughts, text, and calls as name and arguments in one string."""
    parser = AnswerParser(thinking, form, trims=trims)
    thoughts, texts, calls = "", "", list[str]()
    for event in [e for piece in pieces for e in parser.push(piece)] + parser.finish():
        match event:
            case ThinkingDelta(text):
                assert not texts and not calls
                thoughts += text
            case ContentDelta(text):
                texts += text
            case ToolCallBegin(_, _, name):
                calls.append(name)
            case ArgumentsDelta(index, text):
                calls[index] += text
    assert parser.num_calls == len(calls)
    return thoughts, texts, calls


@pytest.mark.parametrize("trims", [False, True])
@given(places=st.lists(st.integers(0, len(ANSWER)), max_size=12))
def test_an_answer_in_any_pieces(trims: bool, places: list[int]) -> None:
    pieces = [ANSWER[a:b] for a, b in pairwise(sorted({0, len(ANSWER), *places}))]
    thoughts, text = "\nI call <tool_call>.\n", "\n\nWell."
    if trims:
        thoughts, text = thoughts.strip(), text.lstrip()
    assert parse(pieces, False, HERMES, trims) == (thoughts, text, ['f{"a": 1}'])
    whole = ANSWER.partition("</think>")[2]
    after = whole.lstrip() if trims else whole
    assert parse(pieces, False, None, trims) == (thoughts, after, [])


def test_a_prompt_may_have_opened_the_block() -> None:
    assert parse(["so</think>yes"], True, None, False) == ("so", "yes", [])
    assert parse(["so</think>yes"], False, None, False) == ("", "so</think>yes", [])
