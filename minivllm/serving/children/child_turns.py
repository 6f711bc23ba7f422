"""Child processes that do in turns what clients ask and what may end a process: what ends a child,
or takes it too long, is an error of its client."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from heapq import heappop, heappush
from typing import Any, NamedTuple

from minivllm.platform.processes.mortal import LONGEST, Died, MortalProcess, TookTooLong, packed
from minivllm.serving.errors import ApiError, overloaded

PROCESSES = 2
SECONDS = 60.0  # for an answer of a child that other processes leave no time
MOST_WAITING, MOST_WAITING_BYTES = 256, 256 << 20  # questions


class Work(NamedTuple):
    """What a kind of child does.

    Args:
        module: its `__main__`, which calls `answer_lines`.
        what: one piece of its work, for errors.
        cpu_seconds: of a processor, for one piece.
        large: bytes of a question, for which one process is kept free.
    """

    module: str
    what: str
    cpu_seconds: float
    large: int


class ChildTurns:
    """Child processes that take questions in turns: of the client that had the least of them done,
    its smallest first. A large one never takes the last free process.

    Args:
        work: of the children.
        settings: each child gets them first.
        longest: bytes of an answer.
    """

    def __init__(self, work: Work, settings: Any, longest: int = LONGEST) -> None:
        self.work = work
        first = partial(packed, settings)
        self._free = [MortalProcess(work.module, first, longest) for _ in range(PROCESSES)]
        self._processes = [*self._free]
        self._waiting: dict[str, list[tuple[int, int, _Waiting]]] = {}  # heaps, by client
        self._done: dict[str, int] = {}  # bytes of each client that waits
        self._running: set[asyncio.Task[None]] = set()
        self._count = 0

    def stop(self) -> None:
        """End the child processes."""
        for process in self._processes:
            process.stop()

    async def answer(
        self, question: bytes, client: str, param: str | None = None
    ) -> dict[str, Any]:
        """The answer of a child, once it is this client's turn.

        Args:
            question: `packed`.
            client: whose turn it is.
            param: the path of the field that has the question.

        Raises:
            ApiError: the child says what is wrong, or has ended; or too much waits.
        """
        sizes = [size for heap in self._waiting.values() for size, _, _ in heap]
        if len(sizes) >= MOST_WAITING or sum(sizes) >= MOST_WAITING_BYTES:
            raise overloaded(f"too many {self.work.what}s wait for their turn: try again later", 1)
        waiting = _Waiting(question, param, asyncio.get_running_loop().create_future())
        if client not in self._waiting:
            self._waiting[client] = []
            self._done[client] = min(self._done.values(), default=0)
        self._count += 1
        heappush(self._waiting[client], (len(question), self._count, waiting))
        self._go_on()
        found = await waiting.answer
        if (error := found.get("error")) is not None:
            status, message, kind, param = error
            raise ApiError(status, message, kind=kind, param=param)
        return found

    def _go_on(self) -> None:
        """Give free processes what waits."""
        while self._free and (next_one := self._next()) is not None:
            task = asyncio.ensure_future(self._run(self._free.pop(), next_one))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    def _next(self) -> _Waiting | None:
        for client in sorted(self._waiting, key=self._done.__getitem__):
            heap = self._waiting[client]
            while heap and heap[0][2].answer.done():  # its client has left
                heappop(heap)
            if heap and (heap[0][0] < self.work.large or len(self._free) > 1):
                size, _, found = heappop(heap)
                self._done[client] += size
            else:
                found = None
            if not heap:
                del self._waiting[client], self._done[client]
            if found is not None:
                return found
        return None

    async def _run(self, process: MortalProcess, waiting: _Waiting) -> None:
        try:
            answer = await asyncio.to_thread(self._answer_of, process, waiting)
            if not waiting.answer.done():
                waiting.answer.set_result(answer)
        except Exception as error:
            if not waiting.answer.done():
                waiting.answer.set_exception(error)
        finally:
            self._free.append(process)
            self._go_on()

    def _answer_of(self, process: MortalProcess, waiting: _Waiting) -> dict[str, Any]:
        """What a child says to a question, or its end."""
        what, seconds = self.work.what, self.work.cpu_seconds
        try:
            answer: dict[str, Any] = json.loads(process.ask(waiting.question, SECONDS))
            return answer
        except Died:
            words = f"the {what} takes more than {seconds:g} s, or more memory than it may"
        except TookTooLong:
            words = f"the {what} was not done within {SECONDS:g} s"
        return wrong(f"{words}: make it smaller", waiting.param)


class _Waiting(NamedTuple):
    question: bytes
    param: str | None
    answer: asyncio.Future[dict[str, Any]]


def wrong(message: str, param: str | None = None) -> dict[str, Any]:
    """An answer that says what is wrong with a question."""
    return {"error": [400, message, "invalid_request_error", param]}
