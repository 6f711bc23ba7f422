"""Messages between two processes arrive whole and in order, and sending never waits."""

from __future__ import annotations

import socket

from hypothesis import given
from hypothesis import strategies as st

from minivllm.platform.processes.channel import Channel, Frames, frame, wait


@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 9))
def test_messages_are_cut_out_of_any_pieces(messages: list[bytes], size: int) -> None:
    data = b"".join(map(frame, messages))
    frames, got = Frames(), []
    for begin in range(0, len(data), size):
        got += frames.push(data[begin : begin + size])
    assert got == messages


def test_sending_more_than_a_socket_takes_does_not_wait() -> None:
    left, right = map(Channel, socket.socketpair())
    big = bytes(8_000_000)
    left.send(big)
    left.send("after it")
    got = []
    while len(got) < 2:
        got += right.receive(1.0)
        left.flush()
    assert got == [big, "after it"]
    assert right.receive(0.0) == [] and not right.closed


def test_the_other_end_is_gone() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    theirs.close()
    assert channel.receive(1.0) == [] and channel.closed
    channel.send("nobody hears it")


def test_of_several_channels_those_that_have_something_are_told() -> None:
    pairs = [tuple(map(Channel, socket.socketpair())) for _ in range(3)]
    ours = [left for left, _ in pairs]
    assert wait(ours, 0.0) == []
    pairs[1][1].send("here")
    pairs[2][1].close()
    assert set(wait(ours, 1.0)) == {ours[1], ours[2]}
    assert ours[1].receive() == ["here"] and ours[2].receive() == [] and ours[2].closed
