"""What a parent that polls makes of a process: its messages, its failure and its end."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest

from minivllm.errors import BadInput, Crashed
from minivllm.platform.processes.channel import Channel
from minivllm.platform.processes.heartbeat import SILENT_S, Beat, Silence
from minivllm.processes.link import PolledLink
from minivllm.processes.messages import Failed


class Two:
    """A link and the other end of its connection."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        started = SimpleNamespace(connection=ours, exit_reason=lambda: "ended with exit code -9")
        self.link, self.child = PolledLink("replica 1 of 2", cast(Any, started), "first"), theirs
        self.channel = Channel(theirs)


@pytest.fixture
def two() -> Iterator[Two]:
    made = Two()
    yield made
    made.link.channel.close()
    made.child.close()


def test_beats_are_no_messages_and_the_end_is_an_error(two: Two) -> None:
    assert two.channel.receive(1.0) == ["first"]
    for message in (Beat(), "one", Beat(3), "two"):
        two.channel.send(message)
    assert list(two.link.receive()) == ["one", "two"]
    two.channel.send("last")
    two.channel.close()
    found = two.link.receive()
    assert next(found) == "last"
    with pytest.raises(Crashed, match=r"^replica 1 of 2 ended with exit code -9$"):
        next(found)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("invalid", BadInput),
        ("oom", MemoryError),
        ("crashed", Crashed),
        ("error", RuntimeError),
    ],
)
def test_what_has_failed_there_is_raised_here(two: Two, status: str, kind: type) -> None:
    two.channel.send(Failed("why", status))
    with pytest.raises(kind, match="why"):
        list(two.link.receive())


def test_silence_is_an_error(two: Two) -> None:
    seconds = count()
    two.link.silence = Silence(SILENT_S, lambda: float(next(seconds)))
    two.link.silence.heard()
    two.link.require_sign()
    with pytest.raises(Crashed, match=r"^replica 1 of 2 has not answered for 8 s; it ended"):
        for _ in range(20):
            two.link.require_sign()
