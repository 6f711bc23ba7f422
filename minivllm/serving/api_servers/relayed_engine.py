"""The engine as an API server sees it: requests go to the server's own process, which routes them,
and tokens come back."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from minivllm.engine.options import SamplingParams
from minivllm.models.vision.inputs import RequestInputs
from minivllm.serving.api_servers.messages import CallEnded, Ended, Share, Submitted
from minivllm.serving.http.calls import CALL, Call
from minivllm.serving.processes.messages import Abort, Step
from minivllm.serving.processes.token_stream import Queued, TokenStream, queued_of


class RelayedEngine:
    """Serves requests with the engines of another process.

    Args:
        number: of this process among all that were started, which its requests are named by.
        slow_reader_pieces: see ServeOptions.
        post: sends the other process a message.
    """

    is_alive = True  # else the other process ends this one

    def __init__(self, number: int, slow_reader_pieces: int, post: Callable[[Any], None]) -> None:
        self.streams: dict[str, TokenStream] = {}  # that have not ended
        self.listeners: list[Callable[[Step], None]] = []  # told of every step
        self._number, self._most_waiting, self._post = number, slow_reader_pieces, post
        self._requests, self._call_numbers = itertools.count(1), itertools.count(1)
        self._calls: dict[Call, int] = {}  # that have requests
        self._told = Queued(0, 0)

    @property
    def queue(self) -> Queued:
        """What waits for the engine in the whole server, as far as it is known here."""
        own = queued_of(self.streams.values())
        return Queued(*map(max, own, self._told))

    def submit(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        session: str | None = None,
        inputs: RequestInputs | None = None,
        is_admitted: bool = False,
    ) -> TokenStream:
        """Send a request; see `EngineClient.submit`. That it is refused comes as its error."""
        request_id = f"a{self._number}r{next(self._requests)}"
        stream = TokenStream(
            request_id, params.n, len(prompt_token_ids), self._most_waiting, self._abort
        )
        self.streams[request_id] = stream
        number, came_s = self._called(stream)
        self._post(
            Submitted(
                request_id,
                prompt_token_ids,
                params,
                inputs,
                session,
                stream.arrived_s,
                is_admitted,
                number,
                came_s,
            )
        )
        return stream

    def _called(self, stream: TokenStream) -> tuple[int, float]:
        """The number of the call that the running code serves, and when it came."""
        call = CALL.get()
        if call is None:
            return next(self._call_numbers), stream.arrived_s
        if call not in self._calls:
            self._calls[call] = next(self._call_numbers)
            call.on_end.append(lambda: self._post(CallEnded(self._calls.pop(call))))
        return self._calls[call], call.began_s

    def _abort(self, stream: TokenStream) -> None:
        if self.streams.pop(stream.request_id, None) is not None:
            self._post(Abort(stream.request_id))

    def take(self, share: Share) -> None:
        """Take what a step gave."""
        step, *told = share
        self._told = Queued(*told)
        for request_id, time_s in step.begun:
            if (stream := self.streams.get(request_id)) is not None:
                stream.begun_s = time_s
        for piece in step.pieces:
            if (stream := self.streams.get(piece.request_id)) is not None:
                stream.push(piece, step.time_s)
                if stream.is_over:
                    self.streams.pop(piece.request_id, None)
        for listener in self.listeners:
            listener(step)

    def end(self, ended: Ended) -> None:
        """Note that a request has ended with an error."""
        if (stream := self.streams.pop(ended.request_id, None)) is not None:
            stream.fail(ended.error)
