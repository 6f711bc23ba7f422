"""Silence is noticed within seconds of the watcher's own time; a heart beats beside long work."""

from __future__ import annotations

import socket
import threading

from hypothesis import given
from hypothesis import strategies as st

from minivllm.platform.processes import heartbeat
from minivllm.platform.processes.channel import LOST_S, Channel, prepare_tcp
from minivllm.platform.processes.heartbeat import (
    BEAT_S,
    SILENT_STARTING_S,
    Beat,
    Progress,
    Silence,
    beat_over,
    beating,
)


class Clock:
    """A clock that the test sets."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@given(st.lists(st.sampled_from(["beat", "look", "late", "stopped"]), max_size=80))
def test_silence_is_counted_in_the_watcher_s_own_time(events: list[str]) -> None:
    clock = Clock()
    silence = Silence(8.0, clock)
    heard, silent_s = False, 0.0
    for event in events:
        if event == "beat":
            silence.heard()
            heard, silent_s = True, 0.0
            continue
        clock.now_s += {"look": BEAT_S, "late": 2 * BEAT_S, "stopped": 3600.0}[event]
        silent_s += heard * (BEAT_S if event == "look" else 2 * BEAT_S)
        assert silence.is_over_limit() == (silent_s > 8.0)


def test_one_that_never_says_anything_is_given_up() -> None:
    clock = Clock()
    silence = Silence(8.0, clock)
    while not silence.is_over_limit():
        clock.now_s += BEAT_S
    assert clock.now_s == SILENT_STARTING_S + BEAT_S
    assert str(silence) == "has not answered for 120 s"


def test_a_process_beats_beside_what_it_does_and_sends_what_was_left() -> None:
    ours, theirs = (Channel(one) for one in socket.socketpair())
    with beating(beat_over(ours)):
        assert theirs.receive(10.0) == [Beat()]
    large = b"x" * (1 << 22)  # more than a socket holds
    ours.send(large)
    assert ours.backlog
    got = []
    with beating(beat_over(ours)):
        while not got:  # nobody else sends what is left
            got = theirs.receive(10.0)
    assert got[0] == large
    theirs.close()
    while not ours.closed:
        ours.send(Beat())
    with beating(beat_over(ours)):  # which ends by itself
        pass
    ours.close()


def test_a_heart_stops_with_its_work() -> None:
    beats = threading.Semaphore(0)
    with beating(beats.release):
        assert beats.acquire(timeout=10)
    names = [thread.name for thread in threading.enumerate()]
    assert "heartbeat" not in names and heartbeat.SILENT_S > 4 * BEAT_S


def test_connections_between_hosts_notice_a_link_that_is_cut() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as one,
    ):
        prepare_tcp(one)
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        limit = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert limit == 1e3 * LOST_S
    ours, theirs = socket.socketpair()
    with ours, theirs:
        prepare_tcp(ours)  # has none of these


@given(st.lists(st.sampled_from(["same", "next", "idle", "gave", "look", "stopped"]), max_size=80))
def test_time_at_one_step_is_counted_in_the_watcher_s_own_time(events: list[str]) -> None:
    clock, progress = Clock(), Progress()
    silence = Silence(1e9, clock, step_limit_s=5.0)
    silence.heard()
    stuck_s = 0.0
    for event in events:
        if event == "next":
            progress.end()
            progress.begin()
        elif event == "idle":
            progress.end()
        if event in ("next", "idle", "gave"):
            stuck_s = 0.0
        if event not in ("look", "stopped"):
            silence.heard("what a step gave" if event == "gave" else Beat(progress.step))
            continue
        clock.now_s += BEAT_S if event == "look" else 3600.0
        runs = progress.step is not None
        stuck_s += runs * (BEAT_S if event == "look" else 2 * BEAT_S)
        assert silence.is_over_limit() == (stuck_s > 5.0)
    assert ("one step for 5 s" in str(silence)) == (stuck_s > 5.0)


def test_beats_name_the_step_of_the_thread_that_works() -> None:
    ours, theirs = (Channel(one) for one in socket.socketpair())
    progress = Progress()
    for expected in (None, 1, None, 2):
        (progress.end if expected is None else progress.begin)()
        with beating(beat_over(ours, progress)):
            assert theirs.receive(10.0)[0] == Beat(expected)
        theirs.receive(0.0)
    ours.close()
    theirs.close()
