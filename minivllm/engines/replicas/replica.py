"""The process of a replica under measurement.

The configuration comes first over the socket, then requests and calls; the outputs of each step go
back. The end of the connection ends the process.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from minivllm.config.compose import build
from minivllm.engines.base import EngineOutput, KvTransfer
from minivllm.engines.replicas.messages import (
    Ask,
    Built,
    Loading,
    Outputs,
    Reply,
    step_message,
)
from minivllm.errors import BadInput
from minivllm.parallel.handover import Handover
from minivllm.platform.processes.channel import Channel
from minivllm.platform.processes.heartbeat import Progress
from minivllm.platform.threads import thread_count
from minivllm.processes.messages import Prefix, Submit, failed
from minivllm.processes.router import CacheShape
from minivllm.processes.started import run_child, serve_engine

PATIENCE_S = 0.005  # most seconds that a policy may wait for a fuller batch before new requests


class ReplicaLoop:
    """Drives one engine as its channel says.

    Args:
        engine: under test.
        channel: to the process that measures.
    """

    def __init__(self, engine: Any, channel: Channel) -> None:
        self._engine, self._channel = engine, channel
        self._unfinished: set[str] = set()
        self._handed_over: dict[str, float] = {}  # what was given and taken, for the liveness
        self._handing_over: dict[str, Submit] = {}
        self._transfers: dict[str, KvTransfer] = {}  # that the next output of a request tells

    def run(self) -> None:
        """Serve until the other end is gone.

        Raises:
            Exception: whatever the engine raises, but for bad input.
        """
        channel = self._channel
        while not channel.closed:
            for message in channel.receive(0.0 if self._unfinished else None):
                try:
                    self._handle(message)
                except BadInput as error:
                    self._reject(message, error)
            if self._unfinished:
                self._step()

    def _handle(self, message: Submit | Ask) -> None:
        match message:
            case Submit(request_id, prompt, params):
                if message.prefix:
                    begin = time.perf_counter()
                    self._engine.put_prefix(prompt, message.prefix)
                    ms_taken = 1e3 * (time.perf_counter() - begin)
                    self._count("kv_ms_taken", ms_taken)
                    self._transfers[request_id] = KvTransfer(ms_taken=ms_taken)
                if message.inputs is None:
                    self._engine.submit(request_id, prompt, params)
                else:
                    self._engine.submit(request_id, prompt, params, message.inputs)
                self._unfinished.add(request_id)
                if message.hands_over is not None:
                    self._handing_over[request_id] = message
                if message.confirm:
                    self._channel.send(Reply(None))
            case Ask(method, arguments):
                value = getattr(self._engine, method)(*arguments)
                if method == "liveness" and self._handed_over:
                    value["parallel"] = {**value.get("parallel", {}), **self._handed_over}
                if method in ("reset", "recount"):  # they end all requests
                    self._handed_over.clear()
                    self._unfinished.clear()
                    self._transfers.clear()
                    self._handing_over.clear()
                self._channel.send(Reply(value))

    def _count(self, name: str, amount: float) -> None:
        self._handed_over[name] = self._handed_over.get(name, 0.0) + amount

    def _reject(self, message: Submit | Ask, error: BadInput) -> None:
        """Say that a request is not taken, as the end of it where nobody waits for an answer."""
        if isinstance(message, Submit) and not message.confirm:
            output = EngineOutput(message.request_id, (), "refused", error=str(error))
            self._channel.send(Outputs([output]))
        else:
            self._channel.send(failed(error))

    def _step(self) -> None:
        outputs = self._engine.poll(PATIENCE_S)
        for one in outputs:
            if one.finish_reason is not None:
                self._unfinished.discard(one.request_id)
                request = self._handing_over.pop(one.request_id, None)
                if request and request.hands_over and one.finish_reason == "length":
                    self._hand_over(one.request_id, request.prompt_token_ids, request.hands_over)
        if self._transfers:
            outputs = [
                replace(one, kv_transfer=self._transfers.pop(one.request_id, None))
                for one in outputs
            ]
        if outputs:
            self._channel.send(step_message(outputs))

    def _hand_over(self, request_id: str, prompt: list[int], how: Handover) -> None:
        begin = time.perf_counter()
        content = self._engine.take_prefix(prompt)
        given = how.give(content)
        ms_given = 1e3 * (time.perf_counter() - begin)
        self._count("kv_ms_given", ms_given)
        self._count("kv_bytes_handed_over", len(content))
        self._transfers[request_id] = KvTransfer(len(content), ms_given)
        self._channel.send(Prefix(request_id, given))


def serve(channel: Channel) -> int:
    """Build the engine of the configuration that comes first, and serve; returns the exit code."""
    return serve_engine(channel, _serve)


def _serve(config: dict[str, Any], channel: Channel, progress: Progress, exits: ExitStack) -> None:
    engine = build(
        config["engine"],
        {"progress": lambda done, total: channel.send(Loading(done, total))},
        config=config,
    )
    exits.callback(engine.close)
    channel.send(
        Built(
            engine.info,
            engine.tokenizer,
            _prefix_cache(engine),
            thread_count(config["runtime"], config["parallel"]["tensor"]),
            engine.processor,
        )
    )
    ReplicaLoop(engine, channel).run()


def _prefix_cache(engine: Any) -> CacheShape | None:
    """The shape of an engine's prefix cache."""
    cache = engine.engine.cache
    if not cache.layout.prefix_caching:
        return None
    return CacheShape(cache.layout.block_size, cache.pool.num_usable)


if __name__ == "__main__":
    run_child(serve)
