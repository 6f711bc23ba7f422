"""A synthetic load that the server sends to its own engine, for those who watch."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import random

from pydantic import Field

from minivllm.engine.options import SamplingParams
from minivllm.serving.errors import ApiError
from minivllm.serving.openai.forms import Body
from minivllm.serving.processes.token_stream import TokenStream
from minivllm.serving.service import Service

MOST_RATE = 200.0  # requests a second
MOST_UNFINISHED = 512  # requests of the load
PRIORITY = 1000  # clients' requests are more urgent
NUM_PREFIXES = 4
SHARE_WITH_PREFIX = 0.5  # of the prompts; their first half is one of the prefixes


class LoadBody(Body):
    """What the load shall be; a rate of 0 ends it."""

    rate: float = Field(ge=0, le=MOST_RATE, allow_inf_nan=False)  # requests a second
    input_len: int = Field(default=64, ge=1)  # tokens
    output_len: int = Field(default=32, ge=1)


class SyntheticLoad:
    """Requests of random tokens that come one by one, as those of many independent clients.

    They pass the same admission as any other: one that is refused is left out.

    Args:
        service: serves them.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._body = LoadBody(rate=0)
        self._prefixes: list[list[int]] = []
        self._running: asyncio.Task[None] | None = None
        self._requests: dict[asyncio.Task[None], TokenStream] = {}

    def set(self, body: LoadBody) -> None:
        """Change the load. Raises ApiError for requests that do not fit the context."""
        limit = self._service.info.max_model_len
        if body.rate and body.input_len + body.output_len > limit:
            raise ApiError(
                400,
                f"input_len + output_len is {body.input_len + body.output_len}, and the context "
                f"{limit} tokens",
                param="input_len",
            )
        if self._running is not None:
            self._running.cancel()
            self._running = None
        if body.rate > 0:
            if not self._prefixes or body.input_len != self._body.input_len:
                self._prefixes = [self._tokens(body.input_len // 2) for _ in range(NUM_PREFIXES)]
            self._body = body
            # In a context of its own: the requests are no part of the call that sets the load.
            self._running = asyncio.get_running_loop().create_task(
                self._run(), context=contextvars.Context()
            )

    def stop(self) -> None:
        """End the load, and those of its requests that have not ended."""
        if self._running is not None:
            self._running.cancel()
            self._running = None
        for task in self._requests:
            task.cancel()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while not self._service.is_draining:
            due = max(due, loop.time() - 1) + random.expovariate(self._body.rate)
            await asyncio.sleep(due - loop.time())
            self._begin()
        self.stop()

    def _begin(self) -> None:
        if len(self._requests) >= MOST_UNFINISHED:
            return
        body = self._body
        params = SamplingParams(
            max_tokens=body.output_len, temperature=0.0, ignore_eos=True, priority=PRIORITY
        )
        prompt = self._tokens(body.input_len)
        if random.random() < SHARE_WITH_PREFIX:
            prefix = random.choice(self._prefixes)
            prompt[: len(prefix)] = prefix
        with contextlib.suppress(ApiError):  # the queue is full
            (stream,) = self._service.start([prompt], params)
            task = asyncio.create_task(_drain(stream))
            self._requests[task] = stream
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._requests.pop(task).close()  # a task that never began has not closed its stream

    def _tokens(self, count: int) -> list[int]:
        return random.choices(range(self._service.info.vocab_size), k=count)


async def _drain(stream: TokenStream) -> None:
    """Take the tokens of a request until it ends, however it ends."""
    with contextlib.suppress(ApiError):
        async for _ in stream.batches():
            pass
