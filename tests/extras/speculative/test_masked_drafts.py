"""Masks asked with drafts as history: tokens, errors and structure as without speculation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.errors import BadInput
from tests.engine.traffic import GREEDY, Asked, serve
from tests.extras.speculative.drafting import (
    PROPOSERS,
    Scripted,
    draft_with,
    foreseen,
    load,
    same,
    speculator,
)
from tests.reference import make_checkpoint

SYMBOLS = '[]{}",:012ab'
FIRST, END = 20, 1  # the token of the first symbol, and the one that ends an output
LONG = 32  # symbols, after which everything is closed


def next_symbols(text: str) -> str:
    """The symbols that may follow the beginning of a JSON text; none after the end of it.

    Raises:
        ValueError: it is not the beginning of one.
    """
    closers: list[str] = []
    expected, after_string = "value", "after"
    for symbol in text:
        if symbol not in _allowed(expected, closers):
            raise ValueError(text)
        if expected in ("string", "empty string"):
            expected = after_string if symbol == '"' else "string"
        elif symbol in "[{":
            closers.append({"[": "]", "{": "}"}[symbol])
            expected = {"[": "first", "{": "first key"}[symbol]
        elif symbol in "]}":
            closers.pop()
            expected = "after"
        elif symbol == '"':
            after_string = "colon" if "key" in expected else "after"
            expected = "empty string"
        elif symbol == ",":
            expected = "key" if closers[-1] == "}" else "value"
        else:
            expected = "value" if symbol == ":" else "after"
    allowed = _allowed(expected, closers)
    if len(text) > LONG:
        return next((symbol for symbol in ']}":0' if symbol in allowed), "")
    return allowed


def _allowed(expected: str, closers: list[str]) -> str:
    value = '[{"012' if closers else "[{"
    if len(closers) > 2:
        value = '"012'
    end = closers[-1] if closers else ""
    return {
        "value": value,
        "first": value + end,
        "key": '"',
        "first key": '"' + end,
        "empty string": 'ab"',
        "string": 'ab"',
        "colon": ":",
        "after": "," * bool(closers) + end,
    }[expected]


def text_of(output: list[int]) -> str:
    return "".join(SYMBOLS[token - FIRST] for token in output if token != END)


def json_mask(_: list[int], output: list[int]) -> list[int]:
    """A token mask that lets an output be a JSON text alone. As grammars do, it fails at a text
    that it would never have allowed."""
    if any(not FIRST <= token < FIRST + len(SYMBOLS) for token in output):
        raise ValueError(f"no symbol in {output}")
    allowed = next_symbols(text_of(output))
    return [FIRST + SYMBOLS.index(symbol) for symbol in allowed] or [END]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path)
    return path


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[LLM]:
    with load(folder) as llm:
        yield llm


def symbols(text: str) -> list[int]:
    return [FIRST + SYMBOLS.index(symbol) for symbol in text]


CALL = symbols('{"ab":[1,2,{"a":"b"}],"b":{"aa":0}}')
DRAWN = SamplingParams(temperature=1.0, max_tokens=60, token_mask=json_mask)


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_structured_outputs_stay_structured(folder: Path, plain: LLM, proposer: str) -> None:
    """Prompts are full of what may be copied to a wrong place: calls of a tool before."""
    asked = [
        Asked(prompt, replace(DRAWN, temperature=heat, seed=seed))
        for seed, prompt in enumerate([CALL, CALL * 2, [*CALL, 5, 9], symbols("[[1,1,1],")])
        for heat in (0.0, 0.6, 1.2)
    ]
    knobs = ["speculative.adaptive=false", "speculative.num_speculative_tokens=5"]
    with load(folder, *PROPOSERS[proposer], *knobs) as llm:
        found = same(llm.engine, plain.engine, asked)
        counters = speculator(llm.engine).counters
        assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens
    complete = [text_of(tokens) for ((tokens, reason),) in found if reason == "stop"]
    assert len(complete) > 6
    for text in complete:
        json.loads(text)


def mask_that_fails(how: str) -> Any:
    """A mask of four tokens that fails after one of them."""

    def mask(_: list[int], output: list[int]) -> Any:
        if 22 in output:
            if how == "raises":
                raise KeyError("after 22")
            return [] if how == "allows nothing" else [-1]
        return [20, 21, 23] if len(output) < 7 else [20, 21, 22, 23]

    return mask


@pytest.mark.parametrize("how", ["raises", "allows nothing", "names no token"])
@pytest.mark.parametrize("verify", ["same_noise", "rejection"])
def test_a_mask_may_fail_after_a_wrong_draft_and_not_after_a_right_one(
    folder: Path, plain: LLM, how: str, verify: str
) -> None:
    params = replace(GREEDY, max_tokens=24, token_mask=mask_that_fails(how))
    unmasked = replace(GREEDY, max_tokens=24)
    asked = [Asked([7 + i, 8, 20 + i % 4], params, comes=i % 3) for i in range(6)]
    asked += [Asked([9, 9, 9], unmasked)]
    expected = serve(plain.engine, asked)
    reasons = [reason for ((_, reason),) in expected]
    assert "error" in reasons, "no request has failed"
    texts = [one.prompt + tokens for one, ((tokens, _),) in zip(asked, expected, strict=True)]
    wrong = [lambda _: [22, 20, 22], lambda _: [20, 22, 20, 21]]
    drafts = [*wrong, foreseen(texts), foreseen(texts, 3)]
    with load(folder, "speculative=ngram", f"speculative.verify={verify}") as llm:
        rule = speculator(llm.engine).verifier
        for draft in drafts:
            llm.engine.scheduler.rules = ()
            draft_with(llm.engine, Scripted(draft, num_speculative_tokens=5), rule)
            assert serve(llm.engine, asked) == expected
    with pytest.raises((KeyError, BadInput)), load(folder, *PROPOSERS["draft"]) as llm:
        prompts, params = [one.prompt for one in asked], [one.params for one in asked]
        llm.generate(prompts, params, on_error="raise")


def test_a_draft_models_own_masks_fail_nobody(folder: Path, plain: LLM) -> None:
    """It asks the mask before the target does, with drafts of its own as history."""
    params = replace(GREEDY, max_tokens=24, token_mask=mask_that_fails("raises"))
    asked = [Asked([7 + i, 8, 20 + i % 4], params) for i in range(6)]
    for proposer in ("draft", "early_exit"):
        with load(folder, *PROPOSERS[proposer], "speculative.adaptive=false") as llm:
            same(llm.engine, plain.engine, asked)
            assert speculator(llm.engine).counters.num_accepted_tokens > 0


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_a_mask_is_asked_about_right_histories_once_each(folder: Path, proposer: str) -> None:
    """Of the histories that a mask is asked about for each position, one is the output."""
    histories: list[tuple[int, ...]] = []

    def mask(_: list[int], output: list[int]) -> torch.Tensor:
        histories.append(tuple(output))
        return torch.arange(128) % 7 > 0

    with load(folder, *PROPOSERS[proposer], "speculative.adaptive=false") as llm:
        params = replace(GREEDY, max_tokens=20, token_mask=mask)
        output = llm.generate([[5, 6, 5, 6]], [params])[0].outputs[0].token_ids
    asked = set(histories)
    assert all(tuple(output[:length]) in asked for length in range(20))
