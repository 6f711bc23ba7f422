"""Those who watch: each gets the frames of the engine, as fast as it reads, and what the server
uses of its machine."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import psutil

from minivllm.bench.hardware.gpu import NullGpu
from minivllm.processes.messages import ViewFrame
from minivllm.serving.errors import unavailable
from minivllm.serving.http.calls import CALL
from minivllm.serving.processes.token_stream import TokenStream
from minivllm.serving.service import EngineService

MOST_VIEWERS = 16
MOST_FRAMES = 40  # that wait for one viewer: two seconds
MOST_CHARACTERS = 1 << 20  # of these frames
STATE_S = 0.5  # between two whole states, which take the engine's time
GAUGES_S = 1.0


class Viewer:
    """The frames that wait for one client.

    A client that does not read loses them, and then gets the whole state again.

    Args:
        request_state: has the engine send its whole state.
        on_loss: called when frames are lost.
    """

    def __init__(self, request_state: Callable[[], None], on_loss: Callable[[], None]) -> None:
        self.num_frames = self.num_losses = 0
        self.is_current = False  # has the whole state, and every change since then
        self._request_state, self._on_loss = request_state, on_loss
        self._frames: deque[str] = deque()
        self._num_characters = 0
        self._changed = asyncio.Event()

    def begin(self, text: str) -> None:
        """Take the whole state."""
        self._clear()
        self.is_current = True
        self._append(text)

    def push(self, text: str) -> None:
        """Take what has changed."""
        if not self.is_current:
            return
        if len(self._frames) >= MOST_FRAMES or self._num_characters + len(text) > MOST_CHARACTERS:
            self._clear()
            self.is_current = False
            self.num_losses += 1
            self._on_loss()
        else:
            self._append(text)

    def _append(self, text: str) -> None:
        self._frames.append(text)
        self._num_characters += len(text)
        self._changed.set()

    def _clear(self) -> None:
        self._frames.clear()
        self._num_characters = 0

    async def next(self) -> str:
        """All that waits, as one list in JSON; what was lost is made good by the whole state."""
        while not self._frames:
            if not self.is_current:
                self._request_state()
            self._changed.clear()
            await self._changed.wait()
        texts = list(self._frames)
        self._clear()
        self.num_frames += 1
        return texts[0] if len(texts) == 1 else f"[{','.join(text[1:-1] for text in texts)}]"


class Viewers:
    """All viewers of a server.

    Args:
        service: of the engine that they watch.
        gauges: what they get once a second besides.
    """

    def __init__(self, service: EngineService, gauges: Gauges) -> None:
        self._service, self._gauges = service, gauges
        self._viewers: set[Viewer] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._requested_s = float("-inf")
        self._reading: asyncio.Task[None] | None = None
        self.on_empty: list[Callable[[], None]] = []  # called when the last viewer has left
        service.client.viewers.append(self._take)

    def __len__(self) -> int:
        return len(self._viewers)

    def join(self) -> Viewer:
        """A new viewer. Raises ApiError where there are too many."""
        if len(self._viewers) >= MOST_VIEWERS:
            self._service.count("viewers_refused")
            raise unavailable(f"{MOST_VIEWERS} viewers watch already")
        viewer = Viewer(self._need_state, lambda: self._service.count("viewers_behind"))
        if not self._viewers:
            self._service.client.submitted.append(self._note_request)
        self._viewers.add(viewer)
        self._service.num_viewers = len(self._viewers)
        if self._reading is None:
            self._reading = asyncio.create_task(self._read_gauges())
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """Forget a viewer; the engine is no longer watched without one."""
        self._viewers.discard(viewer)
        self._service.num_viewers = len(self._viewers)
        if self._viewers:
            return
        self._service.client.submitted.remove(self._note_request)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        self._service.client.replicas.watch(False)
        for listener in self.on_empty:
            listener()

    def choose(self, number: int) -> None:
        """Let all viewers watch another replica."""
        self._service.client.replicas.watch(True, number)

    def _need_state(self) -> None:
        """Have the engine send its whole state soon, at most every `STATE_S` seconds."""
        if self._timer is None:
            delay = self._requested_s + STATE_S - time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(
                max(0.0, delay), self._request_state
            )

    def _request_state(self) -> None:
        self._timer, self._requested_s = None, time.monotonic()
        self._service.client.replicas.watch(True)

    def _take(self, frame: ViewFrame) -> None:
        """Hand a frame of the engine to those who need it."""
        for viewer in self._viewers:
            if frame.kind == "changes":
                viewer.push(frame.text)
            elif frame.kind == "restart" or not viewer.is_current:
                viewer.begin(frame.text)

    def _note_request(self, stream: TokenStream) -> None:
        """Send viewers the times at which a request of HTTP came and was sent to the engine, and at
        the end of its answer when that was written."""
        call = CALL.get()
        if call is None or call.is_over:
            return
        came_s = stream.arrived_s if call.streams and call.streams[-1].is_over else call.began_s
        self._push_times(stream, came_s)

        def tell_end() -> None:
            self._push_times(stream, came_s, time.perf_counter())

        call.on_end.append(tell_end)

    def _push_times(
        self, stream: TokenStream, came_s: float, answered_s: float | None = None
    ) -> None:
        times = [round(came_s, 6), round(stream.arrived_s, 6), answered_s and round(answered_s, 6)]
        text = json.dumps([{"http": [stream.request_id, *times]}], separators=(",", ":"))
        for viewer in self._viewers:
            viewer.push(text)

    async def _read_gauges(self) -> None:
        while True:
            text = await asyncio.to_thread(self._gauges.read)
            for viewer in self._viewers:
                viewer.push(text)
            await asyncio.sleep(GAUGES_S)


class Gauges:
    """Reads memory and power of the server's machine.

    Args:
        engines: gives the process ids of the engine's replicas, of which some may come and go.
        others: gives those of the server's further processes beside this one.
        gpu: of the engine, or a null object.
    """

    def __init__(
        self,
        engines: Callable[[], Sequence[int]],
        others: Callable[[], Sequence[int]],
        gpu: NullGpu,
    ) -> None:
        self._gpu, self._engines, self._others = gpu, engines, others

    def read(self) -> str:
        """A list with one item, in JSON: `{"gauges": {"time_s", "memory_bytes", "watts"}}`.

        The memory is that of the engine on its GPU, on a CPU what all processes of the server have
        in memory; watts are there where the GPU reports them. A reading on the engine's clock.
        """
        engines = self._engines()
        row = self._gpu.sample(set(engines))
        memory = row.get("gpu_process_memory") or row.get("gpu_memory_used")
        gauges = {
            "time_s": time.monotonic(),
            "memory_bytes": memory or _resident([os.getpid(), *engines, *self._others()]),
        }
        if (watts := row.get("gpu_power_w")) is not None:
            gauges["watts"] = watts
        return json.dumps([{"gauges": gauges}], separators=(",", ":"))


def _resident(pids: Sequence[int]) -> int:
    total = 0
    for pid in pids:
        with suppress(psutil.Error):  # the engine has ended
            total += psutil.Process(pid).memory_info().rss
    return total
