"""The base of engines that compute in an interpreter of their own: a process, and a pipe of JSON
lines to and from it."""

from __future__ import annotations

import json
import os
import selectors
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from minivllm.engine.options import SamplingParams
from minivllm.engines.base import Adapter, EngineOutput
from minivllm.engines.peer_process import Child
from minivllm.errors import BadInput

GRACE_S = 10.0
REJECTIONS = ("ValueError", "TypeError", "ValidationError")


class PipedEngine(Adapter):
    """Drives an engine step by step through a pipe; the process runs `piped_worker.py` with the
    class of `worker`.

    Commands go to the standard input of the process, one JSON object a line, and answers come
    through a pipe of their own, so that nothing that the engine prints can disturb them:

        -> {...what `_begin` is given...}
        <- {"ready": {...}}                      or {"error": "...", "type": "..."}
        -> {"add": [[id, [token ids], {...what `_sampling` returns...}], ...]}
        <- {"tokens": [[id, [token ids], finish reason or null, cached or null], ...]}  once a step
        <- {"refused": [id, why]}
        -> {"reset": clear the prefix cache?}    <- {"reset": true}

    The end of standard input ends the process.

    Attributes:
        peer: name of the engine, for messages.
        worker: file whose class `WORKER` drives the engine there, and which imports nothing of
            this package.
    """

    peer: ClassVar[str]
    worker: ClassVar[Path]
    _keep_prefixes = False  # whether `reset` leaves the prefix cache as it is

    def _begin(self, python: str, environment: Mapping[str, str], given: Mapping[str, Any]) -> None:
        """Start the process and wait until its engine is ready.

        Args:
            python: the interpreter.
            environment: of the process.
            given: the first command.

        Raises:
            BadInput: there is no such interpreter, it lacks the engine, or the engine rejects what
                is configured.
            RuntimeError: the process ended; the last lines that it printed are in the message.
        """
        self._pending: list[list[Any]] = []
        self._unfinished: set[str] = set()
        self._buffer = b""
        self._clear()
        self._results, results = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._results, selectors.EVENT_READ)
        loop = Path(__file__).with_name("piped_worker.py")
        command = (os.path.expanduser(python), str(loop), str(self.worker), str(results))
        try:
            self._child = Child(command, environment, (results,), "engine.python")
        finally:
            os.close(results)
        try:
            self._say(**given)
            self._settled: dict[str, Any] = self._hear("ready")
        except BaseException:
            self.close()
            raise

    def _clear(self) -> None:
        self._steps = self._largest_batch = 0

    def _say(self, **message: Any) -> None:
        self._child.say(json.dumps(message).encode() + b"\n")

    def _messages(self, timeout_s: float | None) -> list[dict[str, Any]]:
        """What has come, after waiting for at most so long."""
        if not self._selector.select(timeout_s):
            return []
        chunk = os.read(self._results, 1 << 20)
        if not chunk:
            raise RuntimeError(f"the {self.peer} process {self._child.exit_reason()}")
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        messages = [json.loads(line) for line in lines]
        for message in messages:
            if "error" in message:
                self._raise(message["type"], message["error"])
        return messages

    def _raise(self, kind: str, error: str) -> None:
        """Pass an exception on; before the engine stands it is mostly about the configuration."""
        line = " ".join(error.split())
        if not hasattr(self, "_settled") and kind in REJECTIONS:
            raise BadInput(f"{self.peer} rejects this configuration: {line[:600]}")
        if kind in ("ImportError", "ModuleNotFoundError"):
            raise BadInput(
                f"engine.python cannot import {self.peer} ({line}): see docs/guides/peers.md for "
                "its environment"
            )
        raise RuntimeError(f"{self.peer}: {kind}: {line}")

    def _hear(self, key: str) -> Any:
        """Wait for an answer; other messages are of aborted requests."""
        while True:
            for message in self._messages(None):
                if key in message:
                    return message[key]

    @abstractmethod
    def _sampling(self, max_tokens: int, params: SamplingParams) -> dict[str, Any]:
        """How to decode a request, as the worker passes it to the engine."""

    def submit(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """See BenchEngine; what is submitted before one poll leaves together."""
        max_tokens = self.tokens_wanted(request_id, prompt_token_ids, params, self._unfinished)
        self._unfinished.add(request_id)
        self._pending.append([request_id, prompt_token_ids, self._sampling(max_tokens, params)])

    def poll(self, timeout_s: float | None = None) -> list[EngineOutput]:
        """Wait for the next tokens; see BenchEngine."""
        if self._pending:
            self._say(add=self._pending)
            self._pending = []
        outputs = []
        for message in self._messages(timeout_s):
            if "refused" in message:
                request_id, why = message["refused"]
                outputs.append(EngineOutput(request_id, (), "abort", error=why))
            step = message.get("tokens", ())
            self._steps += bool(step)
            self._largest_batch = max(self._largest_batch, len(step))
            outputs += [
                EngineOutput(name, tuple(ids), reason, cached_tokens=cached)
                for name, ids, reason, cached in step
            ]
        self._unfinished.difference_update(
            output.request_id for output in outputs if output.finish_reason
        )
        return outputs

    def reset(self) -> None:
        self._restart(clear=not self._keep_prefixes)

    def recount(self) -> None:
        self._restart(clear=False)

    def _restart(self, clear: bool) -> None:
        self._pending = []
        self._unfinished.clear()
        self._say(reset=clear)
        self._hear("reset")
        self._clear()

    def close(self) -> None:
        self._child.stop(GRACE_S)
        self._selector.close()
        os.close(self._results)
