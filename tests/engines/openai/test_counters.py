"""What is counted of streams, and what that says of their text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from minivllm.bench.metrics.stream_validity import check_stream
from minivllm.engines.openai.counters import stream_counters
from minivllm.engines.openai.stream import Tokens
from minivllm.models.load.source import EMBEDDED
from minivllm.models.load.tokenizer import Tokenizer


def stream(texts: Sequence[str], each: int, ids: Sequence[int] | None = None) -> Tokens:
    """An answer in chunks with these texts, of which the server counts `each` token ids, or tells
    in `usage` how many there are."""
    tokenizer = Tokenizer.load(EMBEDDED)
    assert tokenizer is not None
    total = len(texts) * each
    tokens = Tokens("r", lambda output: None, total, lambda t: len(tokenizer.encode(t, False)))
    for i, text in enumerate(texts):
        choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": None}
        if ids is not None:
            choice["token_ids"] = list(ids)
        event: dict[str, Any] = {"choices": [choice]}
        if ids is None:
            event["usage"] = {"prompt_tokens": 3, "completion_tokens": each * (i + 1)}
        tokens.take(event)
    tokens.take({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
    tokens.end()
    return tokens


def said(tokens: Tokens) -> list[str]:
    """The notes of a window with this one answer."""
    return check_stream(stream_counters([(3, tokens)], "ids", tokenizer=Tokenizer.load(EMBEDDED)))[
        1
    ]


def test_more_tokens_than_text_are_noted() -> None:
    tokenizer = Tokenizer.load(EMBEDDED)
    assert tokenizer is not None
    word = " of"
    ids = tokenizer.encode(word, False)
    honest = stream([word] * 8, len(ids), ids)
    assert said(honest) == []
    assert said(stream([word] * 8, len(ids))) == []
    (note,) = said(stream([word] * 8, 4 * len(ids), ids * 4))
    count = 8 * len(ids)
    assert f"counts {4 * count} tokens in answers whose text has {count}" in note
    assert any("more tokens than text" in note for note in said(stream([word] * 8, 4 * len(ids))))


def test_tokens_that_have_no_text_by_right_are_not_counted() -> None:
    tokenizer = Tokenizer.load(EMBEDDED)
    assert tokenizer is not None
    end = tokenizer.token_id("<|endoftext|>")
    assert end is not None
    assert said(stream([""] * 8, 1, [end])) == []  # an answer that goes on past its end


@pytest.mark.parametrize("known", [True, False])
def test_without_a_tokenizer_texts_are_not_read(known: bool) -> None:
    tokens = stream([" of"] * 2, 1)
    tokenizer = Tokenizer.load(EMBEDDED) if known else None
    counters = stream_counters([(3, tokens)], "ids", tokenizer=tokenizer)
    assert ("text_tokens" in counters["stream"]) is known
