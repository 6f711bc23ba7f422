"""The schema of an event, how tokens are counted, and that no stream raises anything but the one
error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.engines.base import EngineOutput
from minivllm.engines.openai.stream import Tokens, apportion, read_stream
from minivllm.engines.openai.stream_event import ServerError, served_models


def stream(
    *events: Any, max_tokens: int = 20, count: Any = None, by: str = "length"
) -> tuple[Tokens, list[int]]:
    """The tokens of a whole stream, and how many came with each chunk in the end."""
    outputs: list[EngineOutput] = []
    tokens = Tokens("r", outputs.append, max_tokens, count, 100)
    for event in events:
        tokens.take(event)
    tokens.take({"choices": [{"text": "", "finish_reason": by}]})
    tokens.end()
    sizes = [len(output.token_ids) for output in outputs]
    counts = list(outputs[-1].counts or [1] * sum(sizes[:-1]))
    parts = [sum(counts[sum(sizes[:i]) : sum(sizes[: i + 1])]) for i in range(len(sizes) - 1)]
    return tokens, [*parts, sizes[-1]]


def text(size: int, **more: Any) -> dict[str, Any]:
    return {"choices": [{"text": "x" * size}], **more}


def usage(tokens: int | None) -> dict[str, Any]:
    return {"usage": {"completion_tokens": tokens, "prompt_tokens": 3}}


def test_usage_on_each_chunk_tells_how_many_tokens_it_holds() -> None:
    tokens, parts = stream(
        text(1, **usage(4)), text(1, **usage(5)), text(1, **usage(20)), usage(20)
    )
    assert parts == [4, 1, 15, 0] and tokens.sizes_known and tokens.prompt_tokens == 3
    assert (tokens.late, tokens.misplaced, tokens.countable, tokens.produced) == (0, 0, True, 20)


def test_what_the_cache_had_is_told_with_the_last_output() -> None:
    for told, expected in (({"prompt_tokens_details": {"cached_tokens": 2}}, 2), ({}, None)):
        outputs: list[EngineOutput] = []
        tokens = Tokens("r", outputs.append, 20, None, 100)
        tokens.take(text(1))
        tokens.take({"choices": [{"text": "x", "finish_reason": "length"}]})
        tokens.take({"usage": {"completion_tokens": 2, "prompt_tokens": 3, **told}})
        tokens.end()
        assert [output.cached_tokens for output in outputs] == [None, None, expected]


def test_timings_and_log_probabilities_tell_as_well() -> None:
    assert stream(*(text(1, timings={"predicted_n": n}) for n in (3, 4, 20)))[1] == [3, 1, 16, 0]
    chunk = {"choices": [{"text": "xx", "logprobs": {"tokens": ["x", "x"]}}]}
    assert stream(chunk, chunk)[1] == [2, 2, 0]


def test_a_chunk_a_token_needs_nothing_else() -> None:
    tokens, parts = stream(*[text(7)] * 20, usage(20), count=len)
    assert parts == [*[1] * 20, 0] and (tokens.late, tokens.misplaced) == (0, 0)
    assert stream(*[text(7)] * 20, count=len)[0].countable, (
        "as many as were asked for, without any usage"
    )


def test_text_is_settled_by_the_total_and_our_own_count() -> None:
    tokens, parts = stream(text(4), text(4), text(2), usage(10), count=len)
    assert parts == [4, 4, 2, 0] and (tokens.late, tokens.misplaced) == (7, 0)
    tokens, parts = stream(text(4), text(4), usage(10))
    assert parts == [5, 5, 0] and tokens.misplaced == 8, "nothing tells how many either holds"
    tokens, parts = stream(text(1), usage(10))
    assert parts == [10, 0] and tokens.misplaced == 0, "there is only one that can hold them"


@pytest.mark.parametrize(
    ("by", "chunks", "countable"),
    [
        ("length", [5, 15], True),
        ("length", [5, 5], False),
        ("stop", [5, 15], False),
        ("stop", [1] * 20, False),
    ],
)
def test_without_usage_only_what_was_asked_can_confirm_a_count(
    by: str, chunks: list[int], countable: bool
) -> None:
    assert stream(*map(text, chunks), count=len, by=by)[0].countable is countable


def test_the_rest_of_a_text_is_no_token() -> None:
    tokens, parts = stream(*[text(1)] * 20, text(3), usage(20))
    assert parts == [*[1] * 20, 0, 0] and tokens.misplaced == 0 and tokens.produced == 20


def test_usage_of_the_last_chunk_alone_does_not_make_its_tokens() -> None:
    """As text-generation-inference sends it."""
    last = {"choices": [{"text": "xxxx", "finish_reason": "length"}], **usage(12)}
    assert stream(text(4), text(4), last, count=len)[1] == [4, 4, 4, 0]


def test_counts_that_contradict_each_other_are_told() -> None:
    ids = {"choices": [{"token_ids": [1, 2]}]}
    assert stream(ids, usage(9))[0].misplaced == 7
    assert stream(ids, usage(1))[0].misplaced == 1
    assert stream(ids, usage(3), by="stop")[0].misplaced == 0, "an end token that is not sent"
    assert stream(*[text(1)] * 12, usage(3))[0].misplaced == 9
    assert stream(*(text(1, **usage(1)) for _ in range(9)), usage(9))[0].produced == 9, (
        "counts of a chunk each"
    )


@pytest.mark.parametrize(
    "event",
    [
        {
            "choices": [{"text": "a", "finish_reason": "length"}],
            "usage": {"completion_tokens": 2 * 10**9},
        },
        {"choices": [], "usage": {"completion_tokens": 21}},
        {"choices": [{"text": "a"}], "timings": {"predicted_n": 10**30}},
        {"choices": [{"token_ids": [1] * 21}]},
        {"choices": [{"text": "a" * 30_000}]},
    ],
)
def test_no_stream_holds_more_than_was_asked_for(event: Any) -> None:
    outputs: list[EngineOutput] = []
    tokens = Tokens("r", outputs.append, 20)
    with pytest.raises(ServerError, match="max_tokens is 20"):
        tokens.take(event)
    assert outputs == []


def test_more_chunks_than_tokens_end_a_stream() -> None:
    with pytest.raises(ServerError, match="holds 21 tokens or more"):
        stream(*[text(1)] * 60)
    with pytest.raises(ServerError, match="holds 1048577 tokens"):
        Tokens("r", print).take({"usage": {"completion_tokens": (1 << 20) + 1}})


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ([1], "the event itself is [1]"),
        (5, "must be an object"),
        ({"choices": "abc"}, "choices is 'abc'"),
        ({"choices": [None]}, "choices[0] is None"),
        ({"choices": [{}, {}]}, "2 choices"),
        ({"choices": [{"text": 5}]}, "text is 5"),
        ({"choices": [{"token_ids": "abc"}]}, "token_ids is 'abc'"),
        ({"choices": [{"token_ids": [-1]}]}, "from 0 to 99"),
        ({"choices": [{"token_ids": [100]}]}, "from 0 to 99"),
        ({"choices": [{"token_ids": [True]}]}, "from 0 to 99"),
        ({"choices": [{"finish_reason": 1}]}, "finish_reason is 1"),
        ({"choices": [{"logprobs": {"tokens": 3}}]}, "tokens is 3"),
        ({"usage": "abc"}, "usage is 'abc'"),
        ({"usage": {"completion_tokens": -5}}, "completion_tokens is -5"),
        ({"usage": {"completion_tokens": float("nan")}}, "completion_tokens is nan"),
        ({"usage": {"prompt_tokens": "x"}}, "prompt_tokens is 'x'"),
        ({"usage": {"prompt_tokens_details": {"cached_tokens": True}}}, "cached_tokens is True"),
        ({"error": {"message": "\x1b[31mred\x1b[0m \x07and\nblue"}}, "red and blue"),
        ({"error": ["a", {"b": 1}]}, "['a', {'b': 1}]"),
    ],
)
def test_a_field_of_another_type_is_one_line(event: Any, message: str) -> None:
    with pytest.raises(ServerError) as caught:
        Tokens("r", print, 20, None, 100).take(event)
    assert (
        message in str(caught.value)
        and "\x1b" not in str(caught.value)
        and "\n" not in str(caught.value)
    )


def test_nulls_and_whole_floats_are_fine() -> None:
    event = {
        "choices": [{"text": None, "token_ids": None, "logprobs": None}],
        "usage": None,
        "error": None,
    }
    assert (
        stream(event, {"choices": None}, text(1), {"usage": {"completion_tokens": 1.0}})[0].produced
        == 1
    )


def test_an_end_that_is_none_of_ours() -> None:
    outputs: list[EngineOutput] = []
    tokens = Tokens("r", outputs.append)
    tokens.take(
        {"choices": [{"text": "x", "token_ids": [1], "finish_reason": "\x1b[1mgone\x1b[0m"}]}
    )
    tokens.end()
    assert outputs[-1].finish_reason == "abort" and outputs[-1].error == "gone"


@pytest.mark.parametrize(
    "value",
    [
        None,
        5,
        "x",
        [1, 2],
        {},
        {"data": None},
        {"data": "abc"},
        {"data": []},
        {"data": [{"x": 1}]},
        {"data": [1]},
    ]
    + [{"data": [{"id": name}]} for name in (None, 5, "")]
    + [
        {"data": [{"id": "m", "max_model_len": size}]} for size in ("huge", -5, 0, True, 1.5, 1e400)
    ],
)
def test_a_list_of_models_that_is_none(value: Any) -> None:
    with pytest.raises(ServerError, match="GET /models"):
        served_models(value)


def test_a_list_of_models() -> None:
    models = served_models(
        {"data": [{"id": "b", "max_model_len": 9.0}, {"id": "a", "max_model_len": None}]}
    )
    assert list(models.items()) == [("b", 9), ("a", None)]


@given(st.integers(0, 200), st.lists(st.integers(1, 50), min_size=1, max_size=30))
def test_apportioning_keeps_the_total_and_leaves_no_chunk_out(
    total: int, weights: list[int]
) -> None:
    parts = apportion(total, weights)
    assert sum(parts) == total and len(parts) == len(weights)
    assert min(parts) >= min(1, total // len(weights))


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
choice = st.fixed_dictionaries(
    {},
    optional={
        "text": st.text(max_size=8) | values,
        "token_ids": st.lists(st.integers(-1, 99), max_size=6) | values,
        "finish_reason": st.sampled_from([None, "stop", "length", "content_filter"]) | values,
        "logprobs": st.fixed_dictionaries({"tokens": st.lists(st.text(max_size=2), max_size=4)})
        | values,
    },
)
numbers = st.integers(-2, 40) | values
events = st.fixed_dictionaries(
    {},
    optional={
        "choices": st.lists(choice, max_size=2) | values,
        "usage": st.fixed_dictionaries(
            {}, optional={"completion_tokens": numbers, "prompt_tokens": numbers}
        )
        | values,
        "timings": st.fixed_dictionaries({}, optional={"predicted_n": numbers}) | values,
        "error": st.none() | values,
    },
)


@pytest.mark.fuzz("server streams")
@given(
    st.fixed_dictionaries(
        {
            "data": values
            | st.lists(
                st.fixed_dictionaries(
                    {"id": st.text(max_size=4) | values}, optional={"max_model_len": numbers}
                )
            )
        }
    )
    | values
)
def test_any_answer_is_a_list_of_models_or_the_one_error(answer: Any) -> None:
    try:
        models = served_models(answer)
    except ServerError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
    else:
        assert models and all(
            name and (context is None or context >= 1) for name, context in models.items()
        )


@pytest.mark.parametrize(
    "raw",
    [
        b'\xef\xbb\xbfdata: {"choices": [{"text": "a"}]}\n\n',
        b'event: completion\nid: 5\nretry: 9\ndata:{"choices":\ndata: [{"text": "a"}]}\n\n',
        b': hello\r\n\r\ndata: {"choices": [{"text": "a"}]}\r\n',
    ],
)
def test_events_are_read_however_the_standard_lets_them_be_written(raw: bytes) -> None:
    end = b'data: {"choices": [{"text": "b", "finish_reason": "stop"}]}\ndata: [DONE]\ndata: {bad'
    outputs: list[EngineOutput] = []
    asyncio.run(
        read_stream(as_lines((raw + end).splitlines(True)), Tokens("r", outputs.append, 20))
    )
    assert [len(output.token_ids) for output in outputs] == [1, 1, 0]
    assert outputs[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"data: {not\ndata: json\n\n", "is not valid JSON"),
        (b"data: {not json", "is not valid JSON"),
        (b"data: {\n" * 2000, "longer than 1000 lines"),
        (b"data: \xff\n", "is not UTF-8"),
        (b'data: {"object": "error", "message": "too long", "code": 400}\n', "too long"),
    ],
)
def test_an_event_that_cannot_be_read_is_one_line(raw: bytes, message: str) -> None:
    with pytest.raises(ServerError, match=message):
        asyncio.run(read_stream(as_lines(raw.splitlines(True)), Tokens("r", print, 20)))


async def as_lines(raw: list[bytes]) -> AsyncIterator[bytes]:
    for line in raw:
        yield line


@pytest.mark.fuzz("server streams")
@given(st.lists(events | values, max_size=30), st.integers(1, 20))
def test_any_events_end_in_tokens_or_in_the_one_error(
    given_events: list[Any], expected: int
) -> None:
    raw = [b"data: " + json.dumps(event).encode() + b"\n" for event in given_events]
    outputs: list[EngineOutput] = []
    tokens = Tokens("r", outputs.append, expected, len, 100)
    try:
        asyncio.run(read_stream(as_lines(raw), tokens))
    except ServerError as error:
        tokens.fail(str(error))
    assert [output.finish_reason is not None for output in outputs] == [
        *[False] * (len(outputs) - 1),
        True,
    ]
    held = sum(len(output.token_ids) for output in outputs)
    assert held <= expected + 1
    if (counts := outputs[-1].counts) is not None:
        assert (
            len(counts) == held - len(outputs[-1].token_ids)
            and sum(counts) <= expected
            and min(counts) >= 0
        )


@pytest.mark.fuzz("server streams")
@given(
    st.lists(
        st.binary(max_size=30)
        | st.binary(max_size=30).map(lambda data: b"data:" + data)
        | st.sampled_from(
            [
                b"\n",
                b"\r\n",
                b"\xef\xbb\xbfdata: {}",
                b'data: {"choices":\n',
                b"data: [{}]}\n",
                b"data: [DONE]\n",
            ]
        ),
        max_size=10,
    )
)
def test_any_bytes_end_in_the_one_error_or_in_an_end(raw: list[bytes]) -> None:
    outputs: list[EngineOutput] = []
    tokens = Tokens("r", outputs.append, 20)
    try:
        asyncio.run(read_stream(as_lines(raw), tokens))
    except ServerError as error:
        tokens.fail(str(error))
    assert outputs[-1].finish_reason == "abort"
