"""The events of a stream make up the content of the whole message, as Anthropic's package reads
them."""

from __future__ import annotations

import functools
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from minivllm.serving.anthropic.blocks import ContentBlocks
from minivllm.serving.parsing.answers import Event, ThinkingDelta
from minivllm.serving.parsing.tool_calls import ArgumentsDelta, ContentDelta, ToolCallBegin

ARGUMENTS = ['{"a": 1}', "{}", '{"a": "x\\"y", "b": [1, {"c": null}]}', '{"a": [1, 2', '{"a": "x']
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5)


@st.composite
def events(draw: st.DrawFn) -> list[Event]:
    found: list[Event] = [ThinkingDelta(text) for text in draw(st.lists(TEXTS, max_size=3))]
    calls = 0
    for kind in draw(st.lists(st.booleans(), max_size=6)):
        if kind:
            found.append(ContentDelta(draw(TEXTS)))
            continue
        arguments = draw(st.sampled_from(ARGUMENTS))
        at = draw(st.integers(1, len(arguments)))
        found.append(ToolCallBegin(calls, f"call_{calls}", "f"))
        parts = (arguments[:at], arguments[at:])
        found += [ArgumentsDelta(calls, part) for part in parts if part]
        calls += 1
    return found


@functools.cache
def form() -> TypeAdapter[Any]:
    """What an event of a stream is."""
    from anthropic.types import RawMessageStreamEvent

    return TypeAdapter(RawMessageStreamEvent)


def accumulated(written: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content that the package makes of the events."""
    from anthropic.lib.streaming._messages import accumulate_event

    usage = {"input_tokens": 1, "output_tokens": 1}
    message = {"id": "m", "type": "message", "role": "assistant", "content": [], "model": "x"}
    message |= {"stop_reason": None, "stop_sequence": None, "usage": usage}
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for one in [{"type": "message_start", "message": message}, *written]:
        if one["type"] != "ping":
            snapshot = accumulate_event(
                event=form().validate_python(one), current_snapshot=snapshot, json_bufs=buffers
            )
    return [block.to_dict() for block in cast(Any, snapshot).content]


@given(events(), st.booleans())
def test_a_stream_is_the_whole_message(given_events: list[Event], shows: bool) -> None:
    blocks = ContentBlocks(shows)
    written = [one for event in given_events for one in blocks.add([event])] + [*blocks.close()]
    found = accumulated(written)
    assert [block["type"] for block in found] == [block["type"] for block in blocks.content]
    for streamed, whole in zip(found, blocks.content, strict=True):
        if whole["type"] == "tool_use":  # the package also keeps values that are not whole
            assert set(whole["input"]) <= set(streamed["input"])
        else:
            assert streamed == whole
    starts = [one["index"] for one in written if one["type"] == "content_block_start"]
    stops = [one["index"] for one in written if one["type"] == "content_block_stop"]
    assert starts == stops == list(range(len(found)))
