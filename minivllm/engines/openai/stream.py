"""A stream of server-sent events, and the tokens of one request in it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from itertools import accumulate, pairwise
from typing import Any

from minivllm.bench.metrics.request_trace import UNKNOWN_TOKEN
from minivllm.engines.base import EngineOutput
from minivllm.engines.openai.stream_event import (
    MOST_TOKENS,
    MOST_WORDS,
    ServerError,
    StreamEvent,
    read_event,
    server_json,
)
from minivllm.platform.untrusted import BYTE_ORDER_MARK, MIB, printable, size

DATA, DONE = b"data:", b"[DONE]"
EVENT = "an event of the stream"  # in errors
MOST_EVENT = 8 * MIB  # of a stream: some repeat the prompt
MOST_LINES = 1000  # that it is written in; all known servers write one
# characters; the longest of known vocabularies, runs of spaces, have a few hundred
LONGEST_TOKEN = 1024
REASONS = {"stop": "stop", "length": "length", "tool_calls": "stop", "function_call": "stop"}


class Tokens:
    """Counts the tokens of one stream as they come, and hands them on.

    A chunk holds as many tokens as the server says: by their ids, by log-probabilities, or by a
    count of all tokens so far (`usage` or `timings` on each chunk). A chunk of which only the text
    is known is handed on as one token; how many it held is settled at the end, when the total is
    known.

    Args:
        request_id: of the request.
        deliver: takes the outputs.
        max_tokens: most tokens of the request; a stream that holds more is wrong.
        count: counts the tokens of a text with our own tokenizer; None where there is none.
        vocab_size: token ids are below; None: not checked.
        read: checks an event of the API at hand.
    """

    def __init__(
        self,
        request_id: str,
        deliver: Callable[[EngineOutput], None],
        max_tokens: int = MOST_TOKENS,
        count: Callable[[str], int] | None = None,
        vocab_size: int | None = None,
        read: Callable[[Any, int | None], StreamEvent] = read_event,
    ) -> None:
        self._read = read
        self._request_id, self._deliver = request_id, deliver
        self._max_tokens, self._count, self._vocab_size = max_tokens, count, vocab_size
        self._reason: str | None = None
        self._ended = False
        self._total: int | None = None  # output tokens in all, as the server counts them
        # index of a token that stands for a chunk -> the chunk's text
        self._texts: dict[int, str] = {}
        self._room = LONGEST_TOKEN * max_tokens  # characters that such texts may still have
        self._unread = self._room  # characters that are still kept of all texts
        self.produced = 0
        self.chunks = 0
        self.late = 0  # tokens that no chunk reported as it came
        self.misplaced = 0  # tokens whose chunk is still not known at the end
        self.countable = True  # whether the number of tokens is known
        self.by_ids = False  # whether chunks report the ids of their tokens
        self.end_lag_s: float | None = None  # from the last token to the end of the stream
        self._last_s = 0.0
        self.prompt_tokens: int | None = None  # as the server counts them
        self._thoughts: list[int] = []  # indices of the tokens of a thinking block
        self._answers = False  # whether something else has come
        self.reasoning_tokens: int | None = None  # as the server counts them, or else we
        # of the prompt, that the server had computed before, where it says so
        self.cached_tokens: int | None = None
        self.texts: list[str] = []  # of the chunks, thoughts included
        self.ids: list[int] = []  # that chunks reported

    @property
    def calls_a_tool(self) -> bool:
        """Whether the answer is a call, whose text is not all that was generated."""
        return self._reason in ("tool_calls", "function_call")

    @property
    def sizes_known(self) -> bool:
        """Whether the server has reported how many tokens every chunk so far holds."""
        return self.chunks > 0 and not self._texts

    def take(self, event: Any) -> None:
        """One event of the stream, a JSON value.

        Raises:
            ServerError: it is an error, has a field of the wrong type, or makes more tokens than
                were requested.
        """
        seen = self._read(event, self._vocab_size)
        if seen.prompt_tokens is not None:
            self.prompt_tokens = seen.prompt_tokens
        if seen.cached_tokens is not None:
            self.cached_tokens = seen.cached_tokens
        if seen.total is not None:
            self._total = seen.total
        if seen.reasoning_tokens is not None:
            self.reasoning_tokens = seen.reasoning_tokens
        self._reason = seen.finish_reason or self._reason
        size = self._size(seen)
        text = seen.reasoning + seen.text
        unsure = size is None and bool(text)
        if unsure:
            self._texts[self.produced] = text
            self._room -= len(text)
        held = int(unsure) if size is None else size
        # The last text of a stream may be what a stop string had held back: a chunk without a token
        # of its own.
        most = max(self._total or 0, self.produced + held - bool(self._texts))
        if most > self._max_tokens or self._room < 0:
            tokens = (
                f"{most} tokens or more"
                if most > self._max_tokens
                else "more text than so many tokens have"
            )
            raise ServerError(f"the stream holds {tokens}, and max_tokens is {self._max_tokens}")
        if self._unread > 0:
            self.texts.append(text)
            self._unread -= len(text)
        self.ids += seen.token_ids or ()
        if held:
            self.chunks += 1
            begins = self._begins_answer(seen, held)
            self._pass_on(seen.token_ids or (UNKNOWN_TOKEN,) * held, begins=begins)

    def _begins_answer(self, seen: StreamEvent, held: int) -> bool:
        """Whether a chunk is the first of the answer after a thinking block, whose tokens are
        noted; a chunk without text belongs to what was before it."""
        if self._answers:
            return False
        if seen.text:
            self._answers = True
            return bool(self._thoughts)
        if seen.reasoning or self._thoughts:
            self._thoughts += range(self.produced, self.produced + held)
        return False

    def _size(self, seen: StreamEvent) -> int | None:
        """How many tokens a chunk holds; None where nothing but its text tells."""
        if seen.token_ids is not None:
            self.by_ids = True
            return len(seen.token_ids)
        if seen.count is not None:
            return seen.count
        if seen.holds_choice and seen.total is not None and not self._texts:
            if seen.total > self.produced:
                return seen.total - self.produced
            if seen.finish_reason is not None:
                return 0  # what was left of the text
        return None

    def _pass_on(
        self,
        ids: tuple[int, ...],
        reason: str | None = None,
        error: str | None = None,
        counts: tuple[int, ...] | None = None,
        begins: bool = False,
    ) -> None:
        if self._ended:
            return
        if reason is not None and self.reasoning_tokens is None and self._thoughts:
            self.reasoning_tokens = sum(1 if counts is None else counts[i] for i in self._thoughts)
        self.produced = (self.produced if counts is None else sum(counts)) + len(ids)
        self._ended = reason is not None
        if ids:
            self._last_s = time.monotonic()
        if reason in REASONS and self.produced:
            self.end_lag_s = time.monotonic() - self._last_s
        self._deliver(
            EngineOutput(
                *(self._request_id, ids, reason),
                error=error,
                counts=counts,
                begins_answer=begins,
                reasoning_tokens=self.reasoning_tokens if reason is not None else None,
                cached_tokens=self.cached_tokens if reason is not None else None,
            )
        )

    def end(self) -> None:
        """The stream is over; one that gave no reason for it was cut off."""
        if self._reason is None:
            self.fail("the server closed the stream before it was done")
            return
        reason = REASONS.get(self._reason, "abort")
        error = printable(self._reason)[:MOST_WORDS] if reason == "abort" else None
        counts = self._settle_texts() if self._texts else self._settle_sizes()
        # of a stream without a single chunk
        rest = 0 if self.produced or not self._total else self._total
        self._pass_on((UNKNOWN_TOKEN,) * rest, reason, error, counts)

    def _settle_sizes(self) -> tuple[int, ...] | None:
        """Compare the sizes of the chunks with the total; tokens of no chunk came with the
        last one."""
        difference = 0 if self._total is None else self._total - self.produced
        self.late = max(0, difference)
        # An end token may be counted, but not sent, or the other way round.
        self.misplaced = 0 if self._reason == "stop" and abs(difference) <= 1 else abs(difference)
        if not self.late or not self.produced:
            return None
        return (*(1,) * (self.produced - 1), 1 + self.late)

    def _settle_texts(self) -> tuple[int, ...] | None:
        """How many tokens each chunk held that is known by its text: the total, distributed by our
        own count."""
        total, limit = self._total, self._max_tokens if self._reason == "length" else None
        if total is None and limit is not None and limit in (self.produced, self.produced - 1):
            total = limit  # a token a chunk, and the request's limit was reached
        if total == self.produced:
            return None
        weights = [1] * self.produced
        for index, text in self._texts.items():
            weights[index] = max(1, self._count(text)) if self._count is not None else 1
        counted = sum(weights)
        if total is None:
            self.countable = counted == limit
            total = min(counted, self._max_tokens)
        elif self.produced - total == 1:
            self.misplaced = 0  # see `take`
        elif self.produced > 1:  # all that a single chunk can hold is in it
            self.misplaced = max(abs(counted - total), self.produced - total)
        self.late = max(0, total - self.produced)
        return tuple(apportion(total, weights))

    def fail(self, why: str) -> None:
        """The request ends without its answer."""
        self._pass_on((), "abort", why)


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """Distribute `total` tokens over chunks: one each, the rest in proportion to what their weights
    are above one.

    Where there are more chunks than tokens, the last chunks get none.
    """
    rest = total - len(weights)
    if rest < 0:
        return [1] * total + [0] * -rest
    above = [weight - 1 for weight in weights]
    above = above if any(above) else [1] * len(weights)
    ends = [round(rest * end / sum(above)) for end in accumulate(above)]
    return [1 + after - before for before, after in pairwise([0, *ends])]


async def read_stream(lines: AsyncIterator[bytes], tokens: Tokens) -> None:
    """Read server-sent events to their end.

    Args:
        lines: of the response's body.
        tokens: takes them.

    Raises:
        ServerError: an event is no JSON, or see `Tokens.take`.
    """
    async with aclosing(read_events(lines)) as events:
        async for event in events:
            tokens.take(event)
    tokens.end()


async def read_events(lines: AsyncIterator[bytes]) -> AsyncGenerator[Any]:
    """The JSON values of a stream. One that is whole in its line is taken at once, whether or not
    an empty line follows; one of several lines, which the standard allows, at the empty line."""
    parts: list[str] = []
    at_start = True
    async for line in lines:
        line = line.removeprefix(BYTE_ORDER_MARK) if at_start else line
        at_start = False
        if not line.strip() and parts:
            yield server_json("\n".join(parts), EVENT)
            parts = []
        if not line.startswith(DATA):
            continue  # a comment, another field, or the empty line after each event
        data = line.removeprefix(DATA).strip()
        if data == DONE:
            break
        try:
            parts.append(data.decode("utf-8"))
        except UnicodeDecodeError:
            raise ServerError("an event of the stream is not UTF-8") from None
        if sum(map(len, parts)) > MOST_EVENT or len(parts) > MOST_LINES:
            raise ServerError(
                f"an event of the stream is longer than {MOST_LINES} lines or {size(MOST_EVENT)}"
            )
        if len(parts) == 1:
            try:
                event = server_json(parts[0], EVENT)
            except ServerError:
                continue
            parts = []
            yield event
    if parts:
        yield server_json("\n".join(parts), EVENT)
