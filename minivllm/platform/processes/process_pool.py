"""Processes that share a list of calls with this one. Torch-free.

Each is a fresh interpreter, started by no fork and without this program's `__main__`, which reads
calls from its standard input and ends with it: none outlives this process, however that ends.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Generic, TypeVar

from minivllm.platform.processes.children import module_path
from minivllm.platform.threads import usable_cores

MOST_PROCESSES = 3  # beside this one, which unpacks whatever they return
SERVE = "from minivllm.platform.processes.process_pool import serve; serve()"

Item = TypeVar("Item")
Result = TypeVar("Result")


class ProcessPool:
    """Processes that take calls from a list whose other calls this process makes itself.

    Until `start`, and where no process can be started, this process makes every call. A call that
    fails in another process, for whatever reason, is made again in this one, which raises the
    error. Leaving the context ends the processes at once.

        with ProcessPool() as pool:
            pool.start()
            drawn = pool.begin(draw, charts)
            ...
            pictures = drawn.results()
    """

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None  # one waits for each process
        self._processes: list[subprocess.Popen[bytes]] = []
        self._own = threading.local()  # the process of each thread

    def start(self) -> None:
        """Start a process for each further core, unless that was done before."""
        count = min(usable_cores() - 1, MOST_PROCESSES)
        if self._threads is not None or count < 1:
            return
        with suppress(OSError):
            for _ in range(count):
                self._processes.append(_started())
        if self._processes:
            free = iter(self._processes)
            self._threads = ThreadPoolExecutor(
                len(self._processes), initializer=lambda: self._take(next(free))
            )

    def _take(self, process: subprocess.Popen[bytes]) -> None:
        self._own.process = process

    def begin(
        self, function: Callable[[Item], Result], items: Sequence[Item]
    ) -> Begun[Item, Result]:
        """Call a function of a module with each item, in the background.

        Args:
            function: found by its module and name in another process.
            items: what `pickle` can write; other items stay in this process.
        """
        if self._threads is None:
            return Begun(function, items, [])
        return Begun(
            function, items, [self._threads.submit(self._call, function, item) for item in items]
        )

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """The results of a function for each item, in their order."""
        return self.begin(function, items).results()

    def _call(self, function: Callable[[Any], Any], item: Any) -> Any:
        """The result that this thread's process has. Raises whatever the way there and back
        raises, and RuntimeError where the function raised."""
        request = pickle.dumps((function, item))
        stdin, stdout = self._own.process.stdin, self._own.process.stdout
        pickle.dump(request, stdin)
        stdin.flush()
        done, value = pickle.loads(pickle.load(stdout))
        if not done:
            raise RuntimeError("the call failed in another process")
        return value

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):  # of a request that was not sent
                    assert pipe is not None
                    pipe.close()
        self._processes = []


class Begun(Generic[Item, Result]):
    """Calls that other processes have begun.

    Args:
        function, items: see `ProcessPool.begin`.
        futures: one an item, or none where this process makes every call.
    """

    def __init__(
        self,
        function: Callable[[Item], Result],
        items: Sequence[Item],
        futures: list[Future[Result]],
    ) -> None:
        self._function, self._items, self._futures = function, items, futures

    def results(self) -> list[Result]:
        """The results in the order of the items; this process makes the calls that no other has
        begun, from the last one on."""
        if not self._futures:
            return [self._function(item) for item in self._items]
        found: dict[int, Result] = {}
        for index in reversed(range(len(self._items))):
            if self._futures[index].cancel():
                found[index] = self._function(self._items[index])
        for index, future in enumerate(self._futures):
            if index not in found:
                try:
                    found[index] = future.result()
                except (Exception, CancelledError):
                    found[index] = self._function(self._items[index])
        return [found[index] for index in range(len(self._items))]


def _started() -> subprocess.Popen[bytes]:
    """A process that serves calls; in a group of its own, which Ctrl-C at a terminal does not
    reach."""
    return subprocess.Popen(
        [sys.executable, "-c", SERVE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": module_path()},
        process_group=0,
    )


def serve() -> None:
    """Answer calls from standard input until it ends; standard output is for the answers alone.

    A request and an answer are each bytes within a pickle, so that one that cannot be read leaves
    the next one where it is.
    """
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        with suppress(EOFError, BrokenPipeError):
            while True:
                pickle.dump(_answer(pickle.load(sys.stdin.buffer)), answers)
                answers.flush()


def _answer(request: bytes) -> bytes:
    """Whether the call returned, and what."""
    try:
        function, item = pickle.loads(request)
        return pickle.dumps((True, function(item)))
    except Exception:
        return pickle.dumps((False, None))
