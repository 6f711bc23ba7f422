"""A message, while it is written: thoughts with a budget, blocks, and the events of a stream."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from minivllm.engine.options import SamplingParams
from minivllm.processes.messages import Piece
from minivllm.serving.answers.chat_model import ChatModel, ChatPrompt
from minivllm.serving.anthropic.forms import ending, error_event, stop_reason, usage
from minivllm.serving.anthropic.schemas import MessagesBody
from minivllm.serving.errors import ApiError
from minivllm.serving.http.answers import ApiAnswer, JsonEvent, event
from minivllm.serving.openai.tools import Tools
from minivllm.serving.parsing.answers import Event, ThinkingDelta
from minivllm.serving.parsing.json_reader import completed
from minivllm.serving.parsing.reasoning import END_OF_THOUGHTS
from minivllm.serving.parsing.tool_calls import ArgumentsDelta, ContentDelta, ToolCallBegin
from minivllm.serving.processes.token_stream import TokenStream
from minivllm.serving.service import Service

FORM = "output_config.format.schema"
PING: JsonEvent = {"type": "ping"}
# Of a message's usage, what does not change while it is written.
_USAGE = {
    "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
    "service_tier": "standard",
}


class MessageAnswer(ApiAnswer):
    """One call, while it is answered.

    Args:
        service: answers it.
        chat_model: reads the answer.
        body: of the request.
        prompt: the conversation.
        tools: that the answer may call.
        params: how to decode.
    """

    SILENCE_S = 15.0

    def __init__(
        self,
        service: Service,
        chat_model: ChatModel,
        body: MessagesBody,
        prompt: ChatPrompt,
        tools: Tools | None,
        params: SamplingParams,
    ) -> None:
        super().__init__(service)
        self.chat_model, self.body = chat_model, body
        self.tools, self.params = tools, params
        self.id = f"msg_{uuid.uuid4().hex}"
        self.parser = chat_model.parser(prompt, tools)
        thinking = body.thinking
        self.blocks = ContentBlocks(thinking is None or thinking.display != "omitted")
        self.budget = None if thinking is None else thinking.budget_tokens
        self.prompt, self.token_ids = prompt, list[int]()  # of the answer
        self.num_thinking = 0  # tokens of thoughts
        self.last: Piece | None = None
        self._has_begun = False
        self._goes_on = False  # the thoughts have ended, and another request is to follow

    async def begin(self) -> MessageAnswer:
        """Send it to the engine."""
        params = await self._params(self.prompt)
        return self.start([self.prompt.token_ids], params, self.prompt.inputs)

    async def _params(self, prompt: ChatPrompt) -> SamplingParams:
        """How to decode what follows a prompt."""
        left = max(1, self.body.max_tokens - len(self.token_ids))
        params = replace(self.params, max_tokens=left)
        return await self.chat_model.constrained(params, prompt, self.tools, FORM)

    async def batches(self) -> AsyncGenerator[tuple[int, list[Piece]], None]:
        """The pieces as they come. Where thoughts have taken their budget the model goes on behind
        them, in another request."""
        stream: TokenStream | None = self.streams[0]
        while stream is not None:
            following = None
            async with aclosing(stream.batches()) as batches:
                async for pieces in batches:
                    yield 0, pieces
                    if self._goes_on:  # with these pieces
                        self._goes_on = False
                        following = await self._follow(stream)
                        break
            stream = following

    async def _follow(self, stream: TokenStream) -> TokenStream:
        """Go on with a request as if the model had ended its thoughts (Qwen3 technical report,
        section 4.3)."""
        self.token_ids += self.service.require_tokenizer().encode(END_OF_THOUGHTS, False)
        inputs = self.prompt.inputs
        prompt = ChatPrompt([*self.prompt.token_ids, *self.token_ids], False, inputs)
        return self.service.go_on(stream, prompt.token_ids, await self._params(prompt), inputs)

    def events(self, number: int, pieces: list[Piece]) -> list[JsonEvent]:
        """message_start, and those of each block; of no pieces a ping."""
        events: list[JsonEvent] = [] if pieces else [PING]
        for piece in pieces:
            self.last = piece
            if piece.token_id is not None:
                self.num_thinking += self.parser.is_thinking
                self.token_ids.append(piece.token_id)
            events += self.blocks.add(self.parser.push(piece.text))
            if piece.finish_reason is not None:
                events += [*self.blocks.add(self.parser.finish()), *self.blocks.close()]
            elif self._thinks_too_long:
                self._goes_on = True
                events += self.blocks.add(self.parser.push(END_OF_THOUGHTS))
                break
        if not self._has_begun:
            self._has_begun = True
            message = self._message([], ending(None))
            events = [{"type": "message_start", "message": message}, *events]
        return events

    @property
    def _thinks_too_long(self) -> bool:
        spent = self.budget is not None and self.num_thinking >= self.budget
        return spent and self.parser.is_thinking

    def _message(self, content: list[dict[str, Any]], end: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.service.model,
            "content": content,
            **end,
            "usage": {**self.usage(), **_USAGE},
        }

    def usage(self) -> dict[str, Any]:
        return usage(self.streams[0], len(self.token_ids), self.num_thinking)

    def _end(self) -> dict[str, Any]:
        assert self.last is not None
        return stop_reason(
            self.last, self.parser.num_calls, len(self.token_ids), self.body.max_tokens
        )

    def rendered(self) -> dict[str, Any]:
        return self._message(self.blocks.content, self._end())

    def closing(self) -> list[JsonEvent]:
        end = {"type": "message_delta", "delta": self._end(), "usage": self.usage()}
        return [end, {"type": "message_stop"}]

    def failed(self, error: ApiError) -> bytes:
        return error_event(error)

    def written(self, events: Sequence[JsonEvent]) -> bytes:
        """Events whose names are their types."""
        return b"".join(event(one, one["type"]) for one in events)


class ContentBlocks:
    """Writes the events of an answer as Anthropic's, and keeps the content that they make up.

    Args:
        shows_thinking: thoughts that are not shown are blocks without text.
    """

    def __init__(self, shows_thinking: bool) -> None:
        self.content: list[dict[str, Any]] = []
        self._shows_thinking = shows_thinking
        self._written = ""  # thoughts or arguments of the block that is open
        self._open: str | None = None  # its type

    def add(self, events: Sequence[Event]) -> Iterator[dict[str, Any]]:
        """The events of the stream for the next ones of an answer."""
        for one in events:
            match one:
                case ThinkingDelta(text):
                    yield from self._require({"type": "thinking", "thinking": "", "signature": ""})
                    self._written += text
                    if self._shows_thinking:
                        self.content[-1]["thinking"] += text
                        yield self._delta({"type": "thinking_delta", "thinking": text})
                case ContentDelta(text):
                    yield from self._require({"type": "text", "text": ""})
                    self.content[-1]["text"] += text
                    yield self._delta({"type": "text_delta", "text": text})
                case ToolCallBegin(_, call_id, name):
                    yield from self.close()
                    call = {"id": call_id, "name": name, "input": {}, "caller": {"type": "direct"}}
                    yield from self._require({"type": "tool_use", **call})
                case ArgumentsDelta(_, text):
                    self._written += text
                    yield self._delta({"type": "input_json_delta", "partial_json": text})

    def close(self) -> Iterator[dict[str, Any]]:
        """End the block that is open."""
        if self._open == "thinking":
            # Anthropic's signatures are opaque; this one says which thoughts they were.
            signature = hashlib.sha256(self._written.encode(errors="replace")).hexdigest()
            self.content[-1]["signature"] = signature
            yield self._delta({"type": "signature_delta", "signature": signature})
        elif self._open == "tool_use":
            self.content[-1]["input"] = json.loads(completed(self._written))
        if self._open is not None:
            yield {"type": "content_block_stop", "index": len(self.content) - 1}
        self._open, self._written = None, ""

    def _require(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Begin a block, unless one of its type is open."""
        if self._open == block["type"]:
            return
        yield from self.close()
        self._open = block["type"]
        self.content.append(block)
        index = len(self.content) - 1
        yield {"type": "content_block_start", "index": index, "content_block": dict(block)}
        if index == 0:
            yield PING

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}
