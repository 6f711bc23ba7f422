"""The engine as an API server sees it: requests go to the server's own process, which routes them,
and tokens come back."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from minivllm.engine.options import SamplingParams
from minivllm.processes.messages import Abort, Step
from minivllm.serving.api_servers.messages import (
    CallEnded,
    NewRequests,
    RequestFailed,
)
from minivllm.serving.http.calls import CALL, Call
from minivllm.serving.processes.token_stream import Queued, Streams, Submission, TokenStream


class RelayedEngine(Streams):
    """Serves requests with the engines of another process.

    Args:
        number: of this process among all that were started, which its requests are named by.
        slow_reader_pieces: see ServeOptions.
        post: sends the other process a message.
    """

    is_alive = True  # else the other process ends this one

    def __init__(self, number: int, slow_reader_pieces: int, post: Callable[[Any], None]) -> None:
        super().__init__()
        self._number, self._most_waiting, self._post = number, slow_reader_pieces, post
        self._requests, self._call_numbers = itertools.count(1), itertools.count(1)
        self._calls: dict[Call, int] = {}  # that have requests
        self._of_all = Queued(0, 0)  # as the other process has reported last

    @property
    def queue(self) -> Queued:
        """What waits for the engine in the whole server, as far as it is known here: the other
        process refuses what is too much."""
        return Queued(*map(max, super().queue, self._of_all))

    def submit_all(self, requests: Submission) -> list[TokenStream]:
        """Send requests, all or none; see `Engines.submit_all`. That they are refused comes as the
        error of each."""
        prompts, params, session, inputs, is_admitted, _ = requests
        streams = {
            stream.request_id: stream for stream in (self._stream(ids, params) for ids in prompts)
        }
        self.streams |= streams
        arrived_s = min(stream.arrived_s for stream in streams.values())
        number, came_s = self._call(arrived_s)
        by_name = dict(zip(streams, prompts, strict=True))
        self._post(
            NewRequests(by_name, params, inputs, session, arrived_s, is_admitted, number, came_s)
        )
        return [*streams.values()]

    def _stream(self, prompt_token_ids: list[int], params: SamplingParams) -> TokenStream:
        request_id = f"a{self._number}r{next(self._requests)}"
        most = self._most_waiting
        return TokenStream(request_id, params.n, len(prompt_token_ids), most, self._abort)

    def _call(self, arrived_s: float) -> tuple[int, float]:
        """The number of the call that the running code serves, and when it came."""
        call = CALL.get()
        if call is None:
            return next(self._call_numbers), arrived_s
        if call not in self._calls:
            self._calls[call] = next(self._call_numbers)
            call.on_end.append(lambda: self._post(CallEnded(self._calls.pop(call))))
        return self._calls[call], call.began_s

    def _abort(self, stream: TokenStream) -> None:
        if self._forget(stream.request_id) is not None:
            self._post(Abort(stream.request_id))

    def take(self, message: Step | Queued | RequestFailed) -> None:
        """Take a message of the other process."""
        match message:
            case Step():
                self.take_step(message)
            case Queued():
                self._of_all = message
            case RequestFailed(request_id, error):
                if (stream := self.streams.pop(request_id, None)) is not None:
                    stream.fail(error)
