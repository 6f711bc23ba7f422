"""What the process of a replica says when its engine cannot be built."""

from __future__ import annotations

import socket

from minivllm.config.compose import compose
from minivllm.engines.replicas.replica import serve
from minivllm.platform.processes.channel import Channel
from minivllm.platform.processes.heartbeat import Beat


def test_an_engine_that_cannot_be_built_is_bad_input() -> None:
    ours, theirs = map(Channel, socket.socketpair())
    ours.send(compose(["runtime.device=cpu", "decoding=sample", "decoding.n=2"]))
    assert serve(theirs) == 2
    (failure,) = (message for message in ours.receive(1.0) if not isinstance(message, Beat))
    assert failure.status == "invalid" and "decoding.n=2" in failure.message
