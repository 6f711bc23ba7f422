"""The requests that an `LLM` has under way, and their tokens as iterators: plain and asynchronous.

Each access to the engine holds one lock, so streams may be read from several threads. An
asynchronous stream runs the engine's steps in a worker thread: the event loop stays free.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Generator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from minivllm.engine.request import Request, RequestState
from minivllm.errors import BadInput
from minivllm.kernels.device import thread_settings
from minivllm.outputs import StreamPiece

if TYPE_CHECKING:
    from minivllm.engine.engine import Engine, TokenOutput
    from minivllm.engine.options import SamplingParams
    from minivllm.models.vision.inputs import RequestInputs


class EngineRequests:
    """The unfinished requests of one engine, and the outputs that nobody has collected yet."""

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        self._lock = threading.RLock()  # the end of a stream may be collected as garbage in a step
        self._worker: ThreadPoolExecutor | None = None
        self._starting = threading.Lock()  # of the worker; an event loop must not wait for a step
        self._settings = thread_settings()  # of the thread that has made the engine
        self._counter = 0
        self._outputs: dict[str, list[TokenOutput]] = {}  # by request id

    @property
    def engine(self) -> Engine:
        """The engine. Raises BadInput after `close`."""
        if self._engine is None:
            raise BadInput("this LLM is closed; make another one")
        return self._engine

    @property
    def uncollected(self) -> dict[str, list[TokenOutput]]:
        """The outputs that nobody has collected, by the id of each request under way."""
        return self._outputs

    def submit(
        self, ids: list[int], params: SamplingParams, inputs: RequestInputs | None
    ) -> Request:
        """Add a request to the engine. Raises BadInput if it cannot be served."""
        with self._lock:
            request = self.engine.add_request(str(self._counter), ids, params, inputs=inputs)
            self._counter += 1
            for one in (request,) if request.is_joint else (request, *request.unstarted):
                self._outputs[one.request_id] = []
        return request

    def collect(self, request_ids: Collection[str]) -> list[TokenOutput]:
        """Remove and return the outputs of these requests, after a step of the engine where there
        are none.

        An exception in a step ends all requests: the step may have lost tokens of other requests.
        """
        with self._lock:
            engine = self.engine
            if engine.has_unfinished and not any(self._outputs[each] for each in request_ids):
                try:
                    outputs = engine.step()
                except BaseException:
                    engine.abort_all()
                    raise
                for output in outputs:
                    self._outputs[output.request.request_id].append(output)
            collected: list[TokenOutput] = []
            for each in request_ids:
                collected += self._outputs[each]
                self._outputs[each] = []
            return collected

    def lost(self, request_ids: Collection[str]) -> bool:
        """Whether no output of these requests is there or will come."""
        with self._lock:
            return not self.engine.has_unfinished and not any(
                self._outputs[each] for each in request_ids
            )

    def forget(self, request_id: str) -> None:
        """End a request, if it is still running, and drop its outputs."""
        with self._lock:
            if self._engine is not None:
                self._engine.abort(request_id)
            self._outputs.pop(request_id, None)

    def stream(self, request: Request) -> Stream:
        """The pieces of a request."""
        pieces = self._pieces(request)
        next(pieces)
        return Stream(pieces, self._executor)

    def _pieces(self, request: Request) -> Generator[StreamPiece]:
        """The pieces of a request, after an empty one that starts the generator.

        Closing a generator that has not started would not run its `finally`, and so not end the
        request.
        """
        try:
            yield StreamPiece(None, "", None)
            while request.state is not RequestState.DONE or self._outputs[request.request_id]:
                for output in self.collect([request.request_id]):
                    if request.error is not None:
                        raise request.error
                    yield StreamPiece(
                        output.token_id, output.text, output.finish_reason, output.logprobs
                    )
            if request.finish_reason == "abort":
                yield StreamPiece(None, "", "abort")
        finally:
            self.forget(request.request_id)

    def _executor(self) -> Executor:
        """One thread that runs the steps of all asynchronous streams. Raises BadInput after
        `close`."""
        with self._starting:
            _ = self.engine
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, "stream", self._settings)
            return self._worker

    def close(self) -> Engine | None:
        """Accept no more requests; the engine, which is the caller's to close, at the first
        call."""
        with self._lock, self._starting:
            engine, self._engine = self._engine, None
        if self._worker is not None:
            self._worker.shutdown(wait=False)
        return engine


class Stream:
    """The pieces of one completion: `for piece in stream`, or `async for piece in stream`.

    `close` (`aclose`), dropping the stream, or cancelling the task that waits for a piece ends the
    request.

    Args:
        pieces: the generator of the pieces.
        executor: gives the thread that runs the generator for an event loop.
    """

    def __init__(self, pieces: Generator[StreamPiece], executor: Callable[[], Executor]) -> None:
        self._pieces = pieces
        self._executor = executor

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> StreamPiece:
        return next(self._pieces)

    def close(self) -> None:
        """End the request, if it is still running."""
        self._pieces.close()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> StreamPiece:
        try:
            piece = await self._run(next, self._pieces, None)
        except asyncio.CancelledError:
            await self.aclose()  # the step that runs now has to end first
            raise
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def aclose(self) -> None:
        """End the request, if it is still running."""
        try:
            await asyncio.shield(self._run(self._pieces.close))
        except BadInput:  # the LLM is closed, and so no step runs
            self._pieces.close()

    def _run(self, function: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        """Run a function in the worker thread."""
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._executor(), function, *arguments)
