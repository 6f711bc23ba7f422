"""What all APIs share: admission, the tokenizer, and requests on their way to the engine."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from minivllm.engine.options import SamplingParams, StructuredOutputs
from minivllm.errors import BadInput
from minivllm.extras.vision.pictures import Pictures
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.models.vision.inputs import RequestInputs
from minivllm.processes.messages import Piece, Ready, Step
from minivllm.serving.answers.token_texts import TokenTexts
from minivllm.serving.children.chat_templates import ChatTemplates
from minivllm.serving.children.grammar_checks import GrammarChecks, GrammarRequest
from minivllm.serving.children.picture_decoder import PictureDecoder
from minivllm.serving.errors import ApiError, PromptTooLong, overloaded, too_late, unavailable
from minivllm.serving.http.calls import CALL, CLIENT_LEFT, Call, account
from minivllm.serving.options import ServeOptions
from minivllm.serving.processes.engine_client import EngineClient
from minivllm.serving.processes.token_stream import (
    Queued,
    RequestOrigin,
    Submission,
    TokenStream,
)

LONG_TEXT = 4096  # characters, from which a text is encoded in a thread


class Engines(Protocol):
    """What computes the requests of a service.

    Attributes:
        streams: of requests that have not ended, by their ids.
        listeners: called with every step.
    """

    streams: dict[str, TokenStream]
    listeners: list[Callable[[Step], None]]

    @property
    def is_alive(self) -> bool:
        """Whether requests can be served."""

    @property
    def queue(self) -> Queued:
        """What waits for its first token."""

    def submit_all(self, requests: Submission) -> list[TokenStream]:
        """Send requests, all or none; see `EngineClient.submit`."""


class Service:
    """Serves requests of every API.

    Args:
        options: the knobs of task=serve.
        client: computes them.
        info: what the engine says of itself.
        tokenizer: None serves token ids only.
        model: the name that clients ask for.
        pictures: puts images into prompts; None: the model takes none.
        created: when the model was, in seconds of Unix time; None: now.
    """

    def __init__(
        self,
        options: ServeOptions,
        client: Engines,
        info: Ready,
        tokenizer: Tokenizer | None,
        model: str,
        pictures: Pictures | None = None,
        created: int | None = None,
    ) -> None:
        self.pictures = None if pictures is None else PictureDecoder(pictures)
        self.options, self.client, self.info = options, client, info
        self.tokenizer, self.model = tokenizer, model
        self.created = int(time.time()) if created is None else created
        self._token_texts: TokenTexts | None = None
        self._grammars = GrammarChecks(tokenizer)
        self._templates = None if tokenizer is None else ChatTemplates(tokenizer)
        self.is_draining = False
        self.counts: Counter[str] = Counter()  # what clients did, by name
        self.statuses: Counter[int] = Counter()  # of answers over HTTP
        self._begun_at: list[float] = []  # when the last requests got their first token
        client.listeners.append(self._note_begun)

    # ---- admission

    def admit(self, num_sequences: int = 1, num_tokens: int = 0, num_prompts: int = 1) -> None:
        """Check that so many sequences may wait for the engine, before anything is done for them.

        Args:
            num_sequences: completions, of which the engine makes each by itself.
            num_tokens: of their prompts.
            num_prompts: of which they are completions.

        Raises:
            ApiError: 429, too many wait; 400, it is more than may ever wait; 503, the server ends.
        """
        if self.is_draining or not self.client.is_alive:
            raise unavailable("the server is about to end")
        options = self.options
        waiting, tokens = self.client.queue
        many = "n" if num_prompts == 1 else "prompt"
        for name, what, param, there, more in (
            ("max_num_queued_reqs", "completions", many, waiting, num_sequences),
            ("max_num_queued_tokens", "prompt tokens", "prompt", tokens, num_tokens),
        ):
            most = getattr(options, name)
            if more > most:  # trying again would not help
                words = f"{more} {what} are more than task.{name}={most} in one call"
                raise ApiError(400, words, param=param)
            if there + more > most:
                self.count("requests_refused")
                raise overloaded(
                    f"the queue is full ({there} of {name}={most}): try again later",
                    self._retry_after_s(waiting),
                )

    def count(self, name: str) -> None:
        """Count one more of what clients do."""
        self.counts[name] += 1

    def _note_begun(self, step: Step) -> None:
        begun = sum(piece.num_output == 1 for piece in step.pieces)
        if begun:
            self._begun_at = (self._begun_at + [step.time_s] * begun)[-64:]

    def _retry_after_s(self, waiting: int) -> int:
        """Seconds until half of the queue has begun, at the pace of the last requests."""
        if len(self._begun_at) < 2:
            return 1
        pace = (time.perf_counter() - self._begun_at[0]) / len(self._begun_at)
        return min(max(1, math.ceil(waiting / 2 * pace)), 60)

    # ---- text

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ApiError where the model has none."""
        if self.tokenizer is None:
            words = "this checkpoint has no tokenizer: give token ids instead of text"
            raise ApiError(400, words, param="prompt")
        return self.tokenizer

    def token_texts(self) -> TokenTexts:
        """The texts of single tokens. Raises ApiError where the model has no tokenizer."""
        if self._token_texts is None:
            self._token_texts = TokenTexts(self.require_tokenizer())
        return self._token_texts

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; a long one is encoded in a thread."""
        tokenizer = self.require_tokenizer()
        try:
            if len(text) < LONG_TEXT:
                return tokenizer.encode(text, add_special_tokens)
            return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)
        except BadInput as error:
            raise ApiError.of(error, "prompt") from None

    def require_templates(self) -> ChatTemplates:
        """What writes conversations. Raises ApiError where the model has no tokenizer."""
        self.require_tokenizer()
        assert self._templates is not None
        return self._templates

    async def checked(self, request: GrammarRequest) -> StructuredOutputs | None:
        """What the engine is to follow of a client's grammar; see `GrammarChecks.outputs`."""
        return await self._grammars.outputs(request, account())

    async def with_checked(self, params: SamplingParams) -> SamplingParams:
        """The same parameters with a grammar that may go to the engine; see `checked`."""
        if params.structured_outputs is None:
            return params
        outputs = await self.checked(GrammarRequest(params.structured_outputs))
        return replace(params, structured_outputs=outputs)

    def require_model(self, name: str | None) -> None:
        """Raise ApiError where a client asks for another model than the one that is served."""
        if name not in (None, "", self.model):
            raise ApiError(
                404,
                f"the model {name!r:.200} does not exist: this server has {self.model!r}",
                kind="not_found_error",
                param="model",
                code="model_not_found",
            )

    # ---- requests

    def start(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        inputs: RequestInputs | None = None,
    ) -> list[TokenStream]:
        """Send requests to the engine, all or none. `inputs` are the images of each.

        Raises:
            ApiError: a prompt is empty, holds unknown ids or is too long, or too much waits.
        """
        for ids in prompts:
            self._check(ids, params)
        return self._submit(Submission(prompts, params, inputs=inputs))

    def go_on(
        self,
        stream: TokenStream,
        prompt: list[int],
        params: SamplingParams,
        inputs: RequestInputs | None = None,
    ) -> TokenStream:
        """End a request, and send one in its place, which was admitted with it and whose time is
        that of the first.

        Raises:
            ApiError: the prompt is too long.
        """
        self._check(prompt, params)
        stream.close()
        requests = Submission([prompt], params, inputs=inputs, is_admitted=True)
        (following,) = self._submit(requests, stream.arrived_s)
        return following

    def _check(self, ids: list[int], params: SamplingParams) -> None:
        limit = self.info.max_model_len
        if not ids:
            raise ApiError(400, "the prompt is empty", param="prompt")
        if len(ids) >= limit:
            raise PromptTooLong(len(ids), limit)
        if not 0 <= min(ids) <= max(ids) < self.info.vocab_size:
            raise ApiError(400, f"token ids must be in [0, {self.info.vocab_size})", param="prompt")

    def _submit(self, requests: Submission, first_s: float | None = None) -> list[TokenStream]:
        """Send requests of the running call, all or none, once they are admitted; their time is
        counted from `first_s`."""
        if not requests.is_admitted:
            tokens, count = sum(map(len, requests.prompts)), len(requests.prompts)
            self.admit(count * requests.params.n, tokens, count)
        if (call := CALL.get()) is not None:
            if call.has_left:
                raise ApiError(CLIENT_LEFT, "the client has left")
            requests = requests._replace(session=call.session)
        streams = self.client.submit_all(requests)
        for stream in streams:
            since = stream.arrived_s if first_s is None else first_s
            self._attend(stream, requests.params, since)
        return streams

    def _attend(self, stream: TokenStream, params: SamplingParams, first_s: float) -> None:
        """Have a request end with its client and its time, which is counted from `first_s`."""
        call = CALL.get()
        if call is not None:
            call.streams.append(stream)
            stream.cut_off = partial(self._cut_off, call)
        patience = self.options.request_timeout_s
        if params.deadline_ms is not None:
            patience = min(patience, 1e-3 * params.deadline_ms)

        def give_up() -> None:
            if not stream.is_over:
                stream.end(too_late(f"the request did not end within {patience:g} s"))

        left = first_s + patience - time.perf_counter()
        stream.timer = asyncio.get_running_loop().call_later(max(0.0, left), give_up)

    def _cut_off(self, call: Call) -> None:
        self.count("slow_readers")
        call.cut_off()


class EngineService(Service):
    """The service of the process that has the engines, which knows the whole server.

    Attributes:
        num_viewers: who watch the engine.
        api_servers: ids of the processes that answer clients beside this one.
    """

    client: EngineClient
    num_viewers = 0
    api_servers: Sequence[int] = ()

    def relay(
        self,
        prompts: Mapping[str, list[int]],
        params: SamplingParams,
        inputs: RequestInputs | None,
        arrived_s: float,
        is_admitted: bool,
    ) -> list[TokenStream]:
        """Send requests to the engines that an API server has checked, in the running call, all or
        none.

        Args:
            prompts: by the requests' ids.
            arrived_s: when they came there, as of `time.perf_counter`.
            is_admitted: they come in the place of others.

        Raises:
            ApiError: too much waits, or the engine has stopped.
        """
        origins = [RequestOrigin(name, arrived_s) for name in prompts]
        requests = Submission([*prompts.values()], params, None, inputs, is_admitted, origins)
        return self._submit(requests, arrived_s)


async def merged(
    streams: Sequence[TokenStream],
) -> AsyncGenerator[tuple[int, list[Piece]], None]:
    """The pieces of several requests as they come, each with the number of its request.

    Raises:
        ApiError: one of them failed; all others end.
    """
    if len(streams) == 1:
        async for pieces in streams[0].batches():
            yield 0, pieces
        return
    queue: asyncio.Queue[tuple[int, list[Piece]] | ApiError | None] = asyncio.Queue(1)

    async def forward(number: int, stream: TokenStream) -> None:
        try:
            async for pieces in stream.batches():
                await queue.put((number, pieces))
            await queue.put(None)
        except ApiError as error:
            await queue.put(error)

    tasks = [asyncio.create_task(forward(*pair)) for pair in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, ApiError):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        for stream in streams:
            stream.close()
