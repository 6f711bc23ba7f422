"""The engine as the process of HTTP sees it: it is started, asked, and listened to by asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

from minivllm.engine.options import SamplingParams
from minivllm.errors import BadInput
from minivllm.platform.channel import Frames, frame
from minivllm.platform.children import module_path
from minivllm.serving.errors import ApiError, internal, too_late, unavailable
from minivllm.serving.processes.messages import (
    Abort,
    EngineState,
    Failed,
    Piece,
    Ready,
    Rejected,
    Reset,
    ResetPrefixCache,
    Step,
    Submit,
    ViewFrame,
    Watch,
)

STOP_S = 5.0  # for the engine's process to end by itself
OVERFLOW_S = 0.1  # that too many pieces may wait
DIED = "the engine has stopped"


class TokenStream:
    """The tokens of one request, on their way to one client.

    Args:
        request_id: unique.
        num_completions: how many completions it makes.
        num_prompt_tokens: of its prompt.
        most_waiting: pieces that wait for a client that does not read, at most.
        abort: tells the engine to end it.
    """

    def __init__(
        self,
        request_id: str,
        num_completions: int,
        num_prompt_tokens: int,
        most_waiting: int,
        abort: Callable[[TokenStream], None],
    ) -> None:
        self.request_id, self.num_completions = request_id, num_completions
        self.num_prompt_tokens = num_prompt_tokens
        self.arrived_s = time.perf_counter()
        self.begun_s: float | None = None  # its first step in the engine
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self.unfinished = num_completions
        self._unbegun = set(range(num_completions))
        self.error: ApiError | None = None
        self.finish_reason: str | None = None  # of the completion that ended last
        self.timer: asyncio.TimerHandle | None = None  # ends it when it takes too long
        self.on_over: list[Callable[[TokenStream], None]] = []  # called once, at its end
        self.cut_off: Callable[[], None] = lambda: None  # closes its client's connection
        self._most_waiting, self._abort = most_waiting, abort
        self._overflow: asyncio.TimerHandle | None = None  # set while too many pieces wait
        self._pieces: deque[Piece] = deque()
        self._changed = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        """How many of its completions wait for their first token."""
        return 0 if self.is_over else len(self._unbegun)

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes."""
        return self.unfinished == 0 or self.error is not None

    def push(self, piece: Piece, time_s: float) -> None:
        """Take a piece from the engine."""
        self._unbegun.discard(piece.completion)
        if piece.token_id is not None:
            self.num_output_tokens += 1
            self.last_token_s = time_s
            if self.first_token_s is None:
                self.first_token_s, self.num_cached_tokens = time_s, piece.num_cached_tokens
        if piece.finish_reason is not None:
            self.unfinished -= 1
            self.finish_reason = piece.finish_reason
        if self.error is None:
            self._pieces.append(piece)
        if len(self._pieces) > self._most_waiting and self._overflow is None:
            # Not at once: this process may have been late itself, and then many come together.
            loop = asyncio.get_running_loop()
            self._overflow = loop.call_later(OVERFLOW_S, self._check_reader)
        self._settle()

    def _check_reader(self) -> None:
        """End the request of a client that has let too much wait, and its connection."""
        self._overflow = None
        if len(self._pieces) > self._most_waiting and not self.is_over:
            self.end(internal("the client does not read its answer: the request was ended"))
            self.cut_off()

    def fail(self, error: ApiError) -> None:
        """Note that the engine has ended it with an error; the pieces that have come stay."""
        self.error = self.error or error
        self._settle()

    def end(self, error: ApiError) -> None:
        """End it with an error, here and in the engine."""
        self.fail(error)
        self._abort(self)

    def _settle(self) -> None:
        """Wake who waits for a change; nothing is timed once it is over."""
        self._changed.set()
        if self.is_over:
            if self.timer is not None:
                self.timer.cancel()
            listeners, self.on_over = self.on_over, []
            for listener in listeners:
                listener(self)

    async def batches(self) -> AsyncGenerator[list[Piece], None]:
        """The pieces as they come, all that wait at once; a completion ends with a finish reason.

        Leaving the iterator early ends the request.

        Raises:
            ApiError: the request failed.
        """
        try:
            while self._pieces or not self.is_over:
                if not self._pieces:
                    self._changed.clear()
                    await self._changed.wait()
                if self._pieces:
                    taken = list(self._pieces)
                    self._pieces.clear()
                    yield taken
            if self.error is not None:
                raise self.error
        finally:
            self.close()

    def close(self) -> None:
        """End the request, if it has not ended."""
        if not self.is_over:
            self.end(internal("the request was ended"))


class _Connection(asyncio.Protocol):
    """Bytes from the engine's process, as messages."""

    def __init__(self, got: Callable[[Any], None], lost: Callable[[], None]) -> None:
        self._frames, self._got, self._lost = Frames(), got, lost

    def data_received(self, data: bytes) -> None:
        for message in self._frames.push(data):
            self._got(message)

    def connection_lost(self, error: Exception | None) -> None:
        self._lost()


class EngineClient:
    """Starts the engine's process and serves requests with it.

    Args:
        config: the resolved configuration.
        slow_reader_pieces: see ServeOptions.
    """

    def __init__(self, config: dict[str, Any], slow_reader_pieces: int) -> None:
        self._config, self._most_waiting = config, slow_reader_pieces
        self.streams: dict[str, TokenStream] = {}  # that have not ended
        self.state = EngineState(0, 0, 0, {})
        self.counters: dict[str, float] = {}  # the last that have come
        self.listeners: list[Callable[[Step], None]] = []  # told of every step
        self.submitted: list[Callable[[TokenStream], None]] = []  # told of every request
        self.viewers: list[Callable[[ViewFrame], None]] = []  # told of every frame
        self.ended = asyncio.Event()  # the engine has stopped
        self.failure: str | None = None  # why it stopped by itself
        self._count = 0
        self._reset: asyncio.Future[bool] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()

    async def start(self) -> Ready:
        """Start the process and wait until the engine is built.

        Raises:
            BadInput: the engine cannot be built with this configuration.
            RuntimeError: its process failed.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            words = [sys.executable, "-m", "minivllm.serving.processes.engine_process"]
            self._process = subprocess.Popen(
                [*words, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": module_path()},
                start_new_session=True,  # Ctrl-C in the terminal is for this process
            )
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(
            lambda: _Connection(self._receive, self._lost), sock=ours
        )
        self._transport = transport
        self._transport.write(frame(self._config))
        self.info = await self._ready
        return self.info

    @property
    def is_alive(self) -> bool:
        """Whether requests can be served."""
        return self._ready.done() and not self.ended.is_set()

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        assert self._process is not None
        return self._process.pid

    def submit(self, prompt_token_ids: list[int], params: SamplingParams) -> TokenStream:
        """Send a request to the engine.

        Raises:
            ApiError: the engine has stopped.
        """
        if not self.is_alive or self._transport is None:
            raise unavailable(DIED)
        self._count += 1
        stream = TokenStream(
            f"r{self._count}", params.n, len(prompt_token_ids), self._most_waiting, self._abort
        )
        self.streams[stream.request_id] = stream
        self._transport.write(frame(Submit(stream.request_id, prompt_token_ids, params)))
        for listener in self.submitted:
            listener(stream)
        return stream

    def _abort(self, stream: TokenStream) -> None:
        self.streams.pop(stream.request_id, None)
        if self.is_alive and self._transport is not None:
            self._transport.write(frame(Abort(stream.request_id)))

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; False where requests are running."""
        if not self.is_alive or self._transport is None:
            raise unavailable(DIED)
        if self._reset is None or self._reset.done():
            self._reset = asyncio.get_running_loop().create_future()
            self._transport.write(frame(ResetPrefixCache()))
        return await asyncio.shield(self._reset)

    def watch(self, on: bool) -> None:
        """Have the engine send its whole state and what changes, or no more of it."""
        if self.is_alive and self._transport is not None:
            self._transport.write(frame(Watch(on)))

    def _receive(self, message: Any) -> None:
        match message:
            case Step():
                self.state = message.state
                if message.state.counters is not None:
                    self.counters = message.state.counters
                for request_id, time_s in message.begun:
                    if (stream := self.streams.get(request_id)) is not None:
                        stream.begun_s = time_s
                for piece in message.pieces:
                    self._deliver(piece, message.time_s)
                for listener in self.listeners:
                    listener(message)
            case ViewFrame():
                for viewer in self.viewers:
                    viewer(message)
            case Rejected(request_id, text):
                if (stream := self.streams.pop(request_id, None)) is not None:
                    stream.fail(ApiError(400, text))
            case Reset(done):
                if self._reset is not None and not self._reset.done():
                    self._reset.set_result(done)
            case Ready():
                self._ready.set_result(message)
            case Failed(text, bad_input):
                self.failure = text
                if not self._ready.done():
                    self._ready.set_exception(BadInput(text) if bad_input else RuntimeError(text))

    def _deliver(self, piece: Piece, time_s: float) -> None:
        if (stream := self.streams.get(piece.request_id)) is None:
            return
        if piece.error is not None:
            wrong = ApiError(400, piece.error) if piece.bad_input else internal(piece.error)
            stream.end(wrong)  # with its other completions
        elif piece.finish_reason == "shed":
            stream.end(too_late("the request could not meet its deadline"))
        stream.push(piece, time_s)
        if stream.is_over:
            self.streams.pop(piece.request_id, None)

    def _lost(self) -> None:
        """The engine's process is gone."""
        self.ended.set()
        if not self._ready.done():
            self._ready.set_exception(RuntimeError("the engine's process ended while it started"))
        if self._reset is not None and not self._reset.done():
            self._reset.set_result(False)
        for stream in self.streams.values():
            stream.fail(unavailable(DIED))
        self.streams.clear()

    async def stop(self) -> None:
        """End the engine's process."""
        if self._transport is not None:
            self._transport.close()
        if self._process is None:
            return
        for end in (lambda: None, self._process.terminate, self._process.kill):
            end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, STOP_S)
                return
