"""A message while it is written, from a scripted engine; and the events of a stream, which make up
the content of the whole message, as Anthropic's package reads them."""

from __future__ import annotations

import asyncio
import functools
import re
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from starlette.responses import StreamingResponse

from minivllm import SamplingParams
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.processes.messages import Piece
from minivllm.serving.answers.chat_model import ChatModel, ChatPrompt
from minivllm.serving.anthropic.answer import ContentBlocks, MessageAnswer
from minivllm.serving.anthropic.schemas import MessagesBody, Thinking
from minivllm.serving.errors import ApiError
from minivllm.serving.parsing.answers import Event, ThinkingDelta
from minivllm.serving.parsing.reasoning import END_OF_THOUGHTS
from minivllm.serving.parsing.tool_calls import ArgumentsDelta, ContentDelta, ToolCallBegin
from minivllm.serving.processes.token_stream import TokenStream

ARGUMENTS = ['{"a": 1}', "{}", '{"a": "x\\"y", "b": [1, {"c": null}]}', '{"a": [1, 2', '{"a": "x']
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5)
USER: list[Any] = [{"role": "user", "content": "hi"}]


class _Engine:
    """A service whose requests have scripted pieces.

    Args:
        tokenizer: of the model.
        scripts: texts of the tokens of each request, of which the last ones end.
    """

    def __init__(self, tokenizer: Tokenizer, scripts: list[list[str]]) -> None:
        self.tokenizer, self.model, self.scripts = tokenizer, "talker", scripts
        self.asked: list[tuple[list[int], SamplingParams]] = []
        self.aborted: list[TokenStream] = []

    def require_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    def start(
        self, prompts: list[list[int]], params: SamplingParams, inputs: Any = None
    ) -> list[TokenStream]:
        self.asked.append((prompts[0], params))
        stream = TokenStream("r", 1, len(prompts[0]), 99, self.aborted.append)
        texts = self.scripts.pop(0)
        for number, text in enumerate(texts):
            ends = not self.scripts and number == len(texts) - 1
            reason = "stop" if ends else None
            piece = Piece("r", 0, number, number + 1, text, reason, None, None, 0, None, None)
            stream.push(piece, 0.0)
        return [stream]

    def go_on(
        self,
        stream: TokenStream,
        prompt: list[int],
        params: SamplingParams,
        inputs: Any = None,
    ) -> TokenStream:
        stream.close()
        return self.start([prompt], params)[0]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_thoughts_beyond_their_budget_are_ended(chat_folder: Path, is_streamed: bool) -> None:
    tokenizer = Tokenizer(chat_folder)
    engine = _Engine(tokenizer, [["<think>", "one ", "two ", "three ", "four "], ["So", "."]])
    service: Any = engine
    thinking = Thinking.model_construct(type="enabled", budget_tokens=3)
    body = MessagesBody(model="talker", max_tokens=50, messages=USER)
    params, prompt = SamplingParams(max_tokens=50), ChatPrompt([5, 6], False)

    async def run() -> dict[str, Any]:
        model = ChatModel(service)
        asked = body.model_copy(update={"thinking": thinking})
        call = await MessageAnswer(service, model, asked, prompt, None, params).begin()
        if is_streamed:
            assert b"four" not in b"".join([chunk async for chunk in call.chunks()])
        return await call.whole() if not is_streamed else {"content": call.blocks.content}

    message = asyncio.run(run())
    first, second = message["content"]
    assert first["thinking"] == "one two three" and second["text"] == "So."
    ended = tokenizer.encode(END_OF_THOUGHTS, False)
    spent = [0, 1, 2, 3, *ended]
    assert engine.asked[1][0] == [5, 6, *spent]
    assert engine.asked[1][1].max_tokens == 50 - len(spent)
    assert len(engine.aborted) == 1
    if not is_streamed:
        assert message["usage"]["output_tokens"] == len(spent) + 2
        assert message["usage"]["output_tokens_details"] == {"thinking_tokens": 3}
        assert message["usage"]["input_tokens"] == 2


async def stream_of(folder: Path, *later: Piece | ApiError) -> list[str]:
    """The names of the events of a stream whose pieces come after a silence."""
    engine = _Engine(Tokenizer(folder), [[], []])
    service: Any = engine
    body = MessagesBody(model="talker", max_tokens=50, messages=USER)
    params, prompt = SamplingParams(max_tokens=50), ChatPrompt([5, 6], False)
    call = await MessageAnswer(service, ChatModel(service), body, prompt, None, params).begin()
    response = cast(StreamingResponse, await call.response(True))
    text = ""
    pieces = list(later)
    async for chunk in response.body_iterator:
        text += bytes(cast(bytes, chunk)).decode()
        if text.count("event: ping") >= 2 and pieces:
            one = pieces.pop(0)
            call.streams[0].fail(one) if isinstance(one, ApiError) else call.streams[0].push(
                one, 0.0
            )
    return re.findall("event: (.*)", text)


def test_a_silence_has_pings_and_an_error_is_an_event(
    chat_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MessageAnswer, "SILENCE_S", 0.01)
    last = Piece("r", 0, 1, 1, "so", "stop", None, None, 0, None, None)
    names = asyncio.run(stream_of(chat_folder, last))
    assert names[:3] == ["message_start", "ping", "ping"]
    assert list(dict.fromkeys(names)) == [
        *("message_start", "ping", "content_block_start", "content_block_delta"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    names = asyncio.run(stream_of(chat_folder, ApiError(500, "it broke")))
    assert list(dict.fromkeys(names)) == ["message_start", "ping", "error"]


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
