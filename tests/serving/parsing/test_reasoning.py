"""Thinking blocks are taken apart, however their tags are cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.serving.parsing.reasoning import ThinkingSplitter

TEXTS = st.text("ab<>/think \n", max_size=12)


def joined(pairs: list[tuple[bool, str]]) -> tuple[str, str]:
    """The thoughts and the text of an answer."""
    return "".join(t for thought, t in pairs if thought), "".join(t for f, t in pairs if not f)


def split(pieces: list[str], thinking: bool = False, trims: bool = False) -> tuple[str, str]:
    splitter = ThinkingSplitter(thinking, trims)
    pairs = [pair for piece in pieces for pair in splitter.push(piece)]
    return joined(pairs + splitter.finish())


@given(TEXTS, TEXTS, st.booleans(), st.lists(st.integers(0, 40), max_size=12))
def test_any_cut_gives_the_same_split(
    thought: str, text: str, opened: bool, cuts: list[int]
) -> None:
    whole = f"{'' if opened else '<think>'}{thought}</think>{text}"
    points = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    pieces = [whole[a:b] for a, b in pairwise(points)]
    expected = whole.removeprefix("" if opened else "<think>").partition("</think>")[::2]
    assert split(pieces, opened) == expected
    before, after = (part.lstrip() for part in expected)
    assert split(pieces, opened, trims=True) == (before.rstrip(), after)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("a <think>b</think>", ("", "a <think>b</think>")),  # speaks of the tag
        ("\n <think>b</think>c</think><think>", ("b", "c</think><think>")),
        ("a <thi", ("", "a <thi")),
        ("<thi", ("", "<thi")),
        ("<think>b</thi", ("b</thi", "")),
        (" \n", ("", " \n")),
        ("</think>", ("", "</think>")),
    ],
)
def test_a_block_is_one_at_the_beginning(answer: str, expected: tuple[str, str]) -> None:
    assert split([answer]) == split(list(answer)) == expected


def test_text_is_not_held_back_without_need() -> None:
    splitter = ThinkingSplitter(trims=True)
    assert [
        splitter.push(piece) for piece in ("<think>\n", "a", " \n", "b<", "c</think>\n", "d")
    ] == [
        *([], [(True, "a")], [], [(True, " \nb")], [(True, "<c")]),
        [(False, "d")],
    ]
