"""A child process for work that may end it: it answers lines, within bounds of time, memory and
length."""

from __future__ import annotations

import atexit
import base64
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector
from time import monotonic
from typing import Any
from weakref import WeakSet

from minivllm.platform.processes.children import module_path

LONGEST = 64 << 20  # bytes of an answer
Answers = Callable[[Any], dict[str, Any]]


class Died(Exception):
    """The child has ended, or wrote too much, instead of answering."""


class TookTooLong(Exception):
    """No answer has come in time, and the child was ended."""


class MortalProcess:
    """A child process and its pipes; one question at a time. The first question starts the child,
    and so does the first one after its end.

    Args:
        module: its `__main__` reads lines and answers each with one.
        first: gives a question that each child gets before any other; None: there is none.
        longest: bytes of an answer.
    """

    def __init__(
        self, module: str, first: Callable[[], bytes] | None = None, longest: int = LONGEST
    ) -> None:
        self._module, self._first, self._longest = module, first, longest
        self._lock = threading.Lock()
        self._owner = os.getpid()  # a fork must not share the pipes
        self._process: subprocess.Popen[bytes] | None = None
        _ALL.add(self)

    def ask(self, question: bytes, seconds: float) -> bytes:
        """Send a line, and return the answer.

        Args:
            question: without the end of a line.
            seconds: longest wait for the answer.

        Raises:
            Died, TookTooLong: see there. The next question starts another child.
        """
        with self._lock:
            try:
                if self._process is None:
                    self._process = self._started()
                    if self._first is not None:
                        self._exchange(self._process, self._first(), seconds)
                return self._exchange(self._process, question, seconds)
            except BaseException:
                self.stop()
                raise

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": module_path()},
            start_new_session=True,  # Ctrl-C ends an answer, not this
        )

    def _exchange(self, process: subprocess.Popen[bytes], question: bytes, seconds: float) -> bytes:
        assert process.stdin is not None and process.stdout is not None
        left, answer, deadline = memoryview(question + b"\n"), bytearray(), monotonic() + seconds
        os.set_blocking(process.stdin.fileno(), False)
        with DefaultSelector() as selector:
            selector.register(process.stdout, EVENT_READ)
            selector.register(process.stdin, EVENT_WRITE)
            while not answer.endswith(b"\n"):
                ready = selector.select(max(0.0, deadline - monotonic()))
                if not ready:
                    raise TookTooLong
                for key, _ in ready:
                    if key.fileobj is process.stdin:
                        left = _rest(process.stdin.fileno(), left)
                        if not left:
                            selector.unregister(process.stdin)
                        continue
                    piece = os.read(process.stdout.fileno(), 1 << 20)
                    answer += piece
                    if not piece or len(answer) > self._longest:
                        raise Died
        return bytes(answer)

    def stop(self) -> None:
        """End the child process, if there is one. The next question starts another."""
        if self._process is not None and self._owner == os.getpid():
            process, self._process = self._process, None
            process.kill()
            process.communicate()


def _rest(descriptor: int, data: memoryview) -> memoryview:
    """Write what a pipe takes; the rest of the data, which is empty where nobody reads."""
    try:
        return data[os.write(descriptor, data) :]
    except BrokenPipeError:
        return data[:0]


_ALL: WeakSet[MortalProcess] = WeakSet()


@atexit.register
def stop_all() -> None:
    """End every child process of this one."""
    for process in list(_ALL):
        process.stop()


def limit_memory(size: int) -> None:
    """Limit the address space of this process, and write no core file, where the system can."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def packed(value: Any) -> bytes:
    """Settings or a question as a line for a child that calls `answer_lines`."""
    return base64.b64encode(pickle.dumps(value))


def answer_lines(begin: Callable[[Any], Answers], cpu_seconds: float) -> None:
    """The child: a line that is `packed` in, a line of JSON out.

    Args:
        begin: takes the first line, and returns what answers all others; the answer to the first
            is empty.
        cpu_seconds: of a processor, for one answer; more ends this process.
    """
    answers: Answers | None = None
    with suppress(KeyboardInterrupt, BrokenPipeError):
        for line in sys.stdin.buffer:
            given = pickle.loads(base64.b64decode(line))
            answer: dict[str, Any] = {}
            if answers is None:
                answers = begin(given)
            else:
                signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
                answer = answers(given)
                signal.setitimer(signal.ITIMER_PROF, 0)
            sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
            sys.stdout.buffer.flush()
