"""What the process of a replica says when its engine cannot be built."""

from __future__ import annotations

import socket

from minivllm.config.compose import compose
from minivllm.engines.replicas.messages import Broken
from minivllm.engines.replicas.replica import broken, serve
from minivllm.platform.processes.channel import Channel
from minivllm.platform.processes.heartbeat import Beat


def test_an_engine_that_cannot_be_built_is_bad_input() -> None:
    ours, theirs = map(Channel, socket.socketpair())
    ours.send(compose(["runtime.device=cpu", "decoding=sample", "decoding.n=2"]))
    assert serve(theirs) == 2
    (said,) = (message for message in ours.receive(1.0) if not isinstance(message, Beat))
    assert said.kind == "invalid" and "decoding.n=2" in said.message


def test_errors_have_the_status_of_a_record() -> None:
    assert broken(MemoryError("full\nup")) == Broken("full", "oom")
    assert broken(ValueError("wrong")) == Broken("wrong", "error")
