"""Replicas in threads of the test's own process, with an engine that computes nothing."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from minivllm.engines.base import EngineInfo, EngineOutput
from minivllm.engines.replicas.messages import Built
from minivllm.engines.replicas.replica import ReplicaLoop
from minivllm.engines.replicas.replicated import MODULE
from minivllm.errors import BadInput
from minivllm.parallel.handover import Content, taken
from minivllm.platform.processes.channel import Channel
from minivllm.processes.group import EngineGroup
from minivllm.processes.messages import failed
from minivllm.processes.router import CacheShape

LIMIT = 64  # tokens of a prompt and its output


class CountingEngine:
    """Gives every unfinished request one token a step, which counts up from its prompt's length."""

    def __init__(self, number: int) -> None:
        self.info = EngineInfo(
            *("counting", "random", "f", 100, LIMIT, (0,)),
            max_num_seqs=4,
            load_s=0.5,
            memory={"weights": 10, "kv_pool": None},
            warnings=["alike", f"of {number}"],
        )
        self.running: dict[str, tuple[int, int]] = {}  # prompt's length, tokens left
        self.count = 0
        self.fails = False
        self.hangs = threading.Event()
        self.started_s: float | None = None  # of every output

    def submit(self, request_id: str, prompt_token_ids: list[int], params: Any) -> None:
        if len(prompt_token_ids) >= LIMIT:
            raise BadInput(f"request {request_id} is too long")
        self.running[request_id] = len(prompt_token_ids), params.max_tokens
        self.fails = self.fails or params.max_tokens == 13

    def poll(self, timeout_s: float | None = None) -> list[EngineOutput]:
        while self.hangs.is_set():
            time.sleep(0.01)
        if self.fails:
            raise MemoryError("no room")
        outputs = []
        for request_id, (length, left) in list(self.running.items()):
            self.running[request_id] = length, left - 1
            if left == 1:
                del self.running[request_id]
            reason = "length" if left == 1 else None
            outputs.append(EngineOutput(request_id, (length + left,), reason, self.started_s))
        self.count += len(outputs)
        return outputs

    def take_prefix(self, token_ids: list[int]) -> bytes:
        return b"keys"

    def put_prefix(self, token_ids: list[int], content: Content) -> None:
        assert taken(content, 4) == b"keys"

    def reset(self) -> None:
        self.recount()

    def recount(self) -> None:
        self.running.clear()
        self.count = 0

    def steps(self) -> list[dict[str, Any]]:
        return [{"start_s": float(self.count), "num_requests": 1}]

    def liveness(self) -> dict[str, dict[str, float | str]]:
        return {"cache": {"tokens": float(self.count), "block_size": 4.0, "dtype": "float32"}}

    def speculation(self) -> None:
        return None


class PretendedReplica:
    """A replica in a thread; `die` ends it as a kill would.

    Args:
        engine: that it drives; None counts.
    """

    host: str | None = None
    ahead_s = 0.0

    def __init__(self, config: Mapping[str, Any], number: int, engine: Any = None) -> None:
        self.pid = os.getpid()
        self.connection, theirs = socket.socketpair()
        self._socket = theirs
        self.config, self.engine = config, engine or CountingEngine(number)
        self.stopped = False
        self._thread = threading.Thread(target=self._run, args=(Channel(theirs),), daemon=True)
        self._thread.start()

    def _run(self, channel: Channel) -> None:
        channel.receive(None)
        processor = getattr(self.engine, "processor", None)
        channel.send(Built(self.engine.info, None, CacheShape(4, 100), 1, processor))
        try:
            ReplicaLoop(self.engine, channel).run()
        except Exception as error:
            channel.send(failed(error))

    def die(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)

    def exit_reason(self) -> str:
        return "ended with exit code -9; it printed last: nothing"

    def kill(self) -> None:
        self.die()

    def stop(self) -> None:
        self._thread.join(10)
        self.stopped = not self._thread.is_alive()


class PretendedGroup(EngineGroup):
    """Starts replicas in threads.

    Args:
        config: of the whole.
        make_engine: the engine of a replica, of its configuration; None counts.
    """

    def __init__(
        self, config: dict[str, Any], make_engine: Callable[[Mapping[str, Any]], Any] | None = None
    ) -> None:
        super().__init__(config, MODULE, lambda: (), self._start)
        self.replicas: list[PretendedReplica] = []
        # An engine that computes would pin this process.
        self.places = [{**one, "cores": None} for one in self.places]
        self.name, self.is_closed = "threads", False
        self._make_engine = make_engine

    def _start(self, config: Mapping[str, Any]) -> PretendedReplica:
        engine = None if self._make_engine is None else self._make_engine(config)
        self.replicas.append(PretendedReplica(config, len(self.replicas), engine))
        return self.replicas[-1]

    def close(self) -> None:
        self.is_closed = True
