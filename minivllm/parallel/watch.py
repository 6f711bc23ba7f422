"""What other ranks send to rank 0, read in a thread: signs of life, and their answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from queue import Queue
from typing import Any

from minivllm.errors import Crashed
from minivllm.platform.processes.heartbeat import (
    BEAT_S,
    SILENT_BUILDING_S,
    SILENT_S,
    Beat,
    Silence,
)


class RankWatch:
    """Reads the connections of ranks until it is closed, and tells of those that are lost.

    Args:
        channels: to each other rank, by its number.
        lost: called with the number of a rank, what it has done, and whether that is silence: else
            its connection has ended. In a thread.
        make_silence: of a rank, with the limit in seconds.
    """

    def __init__(
        self,
        channels: Mapping[int, Connection],
        lost: Callable[[int, str, bool], None],
        make_silence: Callable[[float], Silence] = Silence,
    ) -> None:
        self._channels, self._lost = dict(channels), lost
        self._answers: dict[int, Queue[Any]] = {rank: Queue() for rank in channels}
        self._silences = {rank: make_silence(SILENT_BUILDING_S) for rank in channels}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._thread.start()

    def answer(self, rank: int) -> Any:
        """The answer of a rank, once it comes.

        Raises:
            Crashed: the rank is lost before that.
        """
        answer = self._answers[rank].get()
        if isinstance(answer, Crashed):
            raise answer
        self._silences[rank].limit_s = SILENT_S  # its part of the engine is built
        return answer

    def _run(self) -> None:
        left = dict(self._channels)
        while left and not self._closing.is_set():
            ready = wait(list(left.values()), BEAT_S)
            for rank, channel in list(left.items()):
                try:
                    if channel in ready:
                        self._read(rank, channel)
                    elif self._silences[rank].is_over_limit():
                        raise TimeoutError(str(self._silences[rank]))
                except (EOFError, OSError) as error:
                    del left[rank]
                    self._give_up(rank, error)

    def _read(self, rank: int, channel: Connection) -> None:
        message = channel.recv()
        self._silences[rank].heard()
        if not isinstance(message, Beat):
            self._answers[rank].put(message)

    def _give_up(self, rank: int, error: Exception) -> None:
        if self._closing.is_set():
            return
        is_silent = isinstance(error, TimeoutError)
        what = str(error) if is_silent else "has ended its connection"
        self._answers[rank].put(Crashed(f"rank {rank} {what}"))
        self._lost(rank, what, is_silent)

    def close(self) -> None:
        """End the thread; the connections are closed afterwards."""
        self._closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join(2 * BEAT_S)
