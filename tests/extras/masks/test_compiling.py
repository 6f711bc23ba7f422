"""Grammars that llguidance compiles survive, whatever their rules name."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.engine.options import StructuredOutputs
from minivllm.errors import BadInput
from minivllm.extras.masks.chains import MOST_CHAIN
from minivllm.extras.masks.compiling import compiled, reason_of
from minivllm.extras.masks.json_schema import guidance
from tests.extras.masks.test_chains import GRAPHS, grammar_of, schema_of


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Over bytes."""
    return guidance().LLTokenizer("byte")


def takes(matcher: Any, text: str) -> bool:
    ids = list(text.encode())
    copy = matcher.deep_copy()
    return copy.try_consume_tokens(ids) == len(ids) and bool(copy.is_accepting())


CHAIN = [[node + 1] for node in range(MOST_CHAIN - 3)] + [[]]


@pytest.mark.parametrize(
    "outputs",
    [
        StructuredOutputs(json=schema_of(CHAIN)),
        StructuredOutputs(grammar=grammar_of(CHAIN)),
        StructuredOutputs(
            grammar="start: R0\n"
            + "\n".join(f'R{i}: "a" R{i + 1}' for i in range(MOST_CHAIN - 3))
            + f'\nR{MOST_CHAIN - 3}: "b"'
        ),
    ],
    ids=["references", "rules", "terminals"],
)
def test_the_longest_chains_that_may_be_are_followed(
    tokenizer: Any, outputs: StructuredOutputs
) -> None:
    assert not compiled(tokenizer, outputs).is_error()


@pytest.mark.parametrize("kind", ["json", "grammar"])
@given(edges=GRAPHS)
@settings(max_examples=25)
def test_any_graph_is_compiled_or_bad_input(
    tokenizer: Any, kind: str, edges: list[list[int]]
) -> None:
    given = {"json": schema_of(edges)} if kind == "json" else {"grammar": grammar_of(edges)}
    try:
        matcher = compiled(tokenizer, StructuredOutputs(**given))
    except BadInput:
        return
    assert kind == "grammar" or takes(matcher, "null")


@given(st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=8))
@settings(max_examples=50)
def test_a_choice_takes_its_texts_and_no_other(tokenizer: Any, choice: list[str]) -> None:
    matcher = compiled(tokenizer, StructuredOutputs(choice=tuple(choice)))
    for text in choice:
        assert takes(matcher, text)
    for other in ("", "a", f"{choice[0]}x", choice[-1][:-1]):
        assert takes(matcher, other) == (other in choice)


def test_a_choice_of_many_texts_is_one_terminal(tokenizer: Any) -> None:
    """Their number does not matter to the lexer, which has to know one terminal."""
    many = tuple(f"text {number * 7919 % 100_003}" for number in range(10_000))
    matcher = compiled(tokenizer, StructuredOutputs(choice=many))
    assert takes(matcher, many[-1]) and not takes(matcher, "text x")


def test_an_error_of_llguidance_has_no_stack_trace() -> None:
    told = "panic: too many symbols\n<backtrace> 0: <unknown>\n 1: core::panicking\n</backtrace>"
    matcher = SimpleNamespace(get_error=lambda: told)
    assert reason_of(matcher) == "panic: too many symbols"


def test_long_chains_name_the_field(tokenizer: Any) -> None:
    longer = [[node + 1] for node in range(MOST_CHAIN)] + [[]]
    with pytest.raises(BadInput, match=r"structured_outputs\.grammar: the grammar has a chain of"):
        compiled(tokenizer, StructuredOutputs(grammar=grammar_of(longer)))
    text = json.dumps(schema_of(longer))
    with pytest.raises(BadInput, match=r"structured_outputs\.json: the JSON schema has a chain"):
        compiled(tokenizer, StructuredOutputs(json=text))
