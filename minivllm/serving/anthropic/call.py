"""A message, while it is written: thoughts with a budget, blocks, and the events of a stream."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from minivllm.engine.options import SamplingParams
from minivllm.serving.answers.chat_model import ChatModel, ChatPrompt
from minivllm.serving.anthropic.blocks import PING, ContentBlocks
from minivllm.serving.anthropic.forms import ending, stop_reason, usage
from minivllm.serving.anthropic.schemas import MessagesBody
from minivllm.serving.http.answers import event, with_silences
from minivllm.serving.openai.tools import Tools
from minivllm.serving.parsing.reasoning import END_OF_THOUGHTS
from minivllm.serving.processes.messages import Piece
from minivllm.serving.processes.token_stream import TokenStream
from minivllm.serving.service import Service

PING_S = 15.0  # without an event, after which a stream has a ping
# Of a message's usage, what does not change while it is written.
_USAGE = {
    "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
    "service_tier": "standard",
}


class MessageCall:
    """One call, while it is answered.

    Args:
        service: answers it.
        chat_model: reads the answer.
        body: what is asked.
        prompt: the conversation.
        tools: that the answer may call.
        params: how to decode.
    """

    def __init__(
        self,
        service: Service,
        chat_model: ChatModel,
        body: MessagesBody,
        prompt: ChatPrompt,
        tools: Tools | None,
        params: SamplingParams,
    ) -> None:
        self.service, self.chat_model, self.body = service, chat_model, body
        self.tools, self.params = tools, params
        self.id = f"msg_{uuid.uuid4().hex}"
        self.parser = chat_model.parser(prompt, tools)
        thinking = body.thinking
        self.blocks = ContentBlocks(thinking is None or thinking.display != "omitted")
        self.budget = None if thinking is None else thinking.budget_tokens
        self.prompt, self.token_ids = prompt, list[int]()  # of the answer
        self.num_thinking = 0  # tokens of thoughts
        self.last: Piece | None = None

    async def start(self) -> MessageCall:
        """Send it to the engine."""
        params = await self._params(self.prompt)
        (self.stream,) = self.service.start([self.prompt.token_ids], params, self.prompt.inputs)
        return self

    async def _params(self, prompt: ChatPrompt) -> SamplingParams:
        """How to decode what follows a prompt."""
        left = max(1, self.body.max_tokens - len(self.token_ids))
        params = replace(self.params, max_tokens=left)
        field = "output_config.format.schema"
        return await self.chat_model.constrained(params, prompt, self.tools, field)

    async def _batches(self) -> AsyncGenerator[list[dict[str, Any]], None]:
        """The events of the stream as they come. Thoughts beyond their budget are ended, and the
        model goes on behind them."""
        stream: TokenStream | None = self.stream
        while stream is not None:
            following = None
            async with aclosing(stream.batches()) as batches:
                async for pieces in batches:
                    events: list[dict[str, Any]] = []
                    for piece in pieces:
                        events += self._events(piece)
                        if self._thinks_too_long(piece):
                            following = await self._end_thoughts(stream)
                            events += self.blocks.add(self.parser.push(END_OF_THOUGHTS))
                            break
                    yield events
                    if following is not None:
                        break
            stream = following

    def _events(self, piece: Piece) -> list[dict[str, Any]]:
        """The events of the stream for a piece."""
        self.last = piece
        if piece.token_id is not None:
            self.num_thinking += self.parser.is_thinking
            self.token_ids.append(piece.token_id)
        events = list(self.blocks.add(self.parser.push(piece.text)))
        if piece.finish_reason is not None:
            events += [*self.blocks.add(self.parser.finish()), *self.blocks.close()]
        return events

    def _thinks_too_long(self, piece: Piece) -> bool:
        return (
            self.budget is not None
            and self.num_thinking >= self.budget
            and self.parser.is_thinking
            and piece.finish_reason is None
        )

    async def _end_thoughts(self, stream: TokenStream) -> TokenStream:
        """Go on with a request as if the model had ended its thoughts (Qwen3 technical report,
        section 4.3)."""
        self.token_ids += self.service.require_tokenizer().encode(END_OF_THOUGHTS, False)
        inputs = self.prompt.inputs
        prompt = ChatPrompt([*self.prompt.token_ids, *self.token_ids], False, inputs)
        return self.service.go_on(stream, prompt.token_ids, await self._params(prompt), inputs)

    def _message(self, content: list[dict[str, Any]], end: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.service.model,
            "content": content,
            **end,
            "usage": {**self._usage(), **_USAGE},
        }

    def _usage(self) -> dict[str, Any]:
        return usage(self.stream, len(self.token_ids), self.num_thinking)

    def _end(self) -> dict[str, Any]:
        assert self.last is not None
        return stop_reason(
            self.last, self.parser.num_calls, len(self.token_ids), self.body.max_tokens
        )

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        async for _ in self._batches():
            pass
        return self._message(self.blocks.content, self._end())

    async def chunks(self) -> AsyncIterator[bytes]:
        """The answer as events: message_start, those of each block, message_delta, message_stop."""
        has_begun = False
        async with aclosing(with_silences(self._batches(), PING_S)) as batches:
            async for batch in batches:
                events = [PING] if batch is None else batch
                if not has_begun:
                    has_begun = True
                    message = self._message([], ending(None))
                    events = [{"type": "message_start", "message": message}, *events]
                if events:
                    yield _written(events)
        end = {"type": "message_delta", "delta": self._end(), "usage": self._usage()}
        yield _written([end, {"type": "message_stop"}])


def _written(events: list[dict[str, Any]]) -> bytes:
    """Events whose names are their types."""
    return b"".join(event(one, one["type"]) for one in events)
