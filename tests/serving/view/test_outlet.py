"""Frames of the live view as the engine's process sends them."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from minivllm.engine.batching import Continuous
from minivllm.processes.messages import ViewFrame
from minivllm.report.view.state import ViewState
from minivllm.serving.view import outlet as module
from minivllm.serving.view.outlet import MOST_BACKLOG, ViewOutlet
from tests.engine.imaginary import Machine, make


class HeldChannel:
    """Keeps what is sent, and takes it as slowly as a test says."""

    def __init__(self) -> None:
        self.sent: list[ViewFrame] = []
        self.backlog = 0

    def send(self, message: ViewFrame) -> None:
        self.sent.append(message)


class Watched:
    """A machine that is watched by nobody yet, and a clock that stands still."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.machine: Machine = make(Continuous(4, 16), blocks=16, prefix_caching=True)
        self.machine.observer.close()
        self.channel, self.now_s = HeldChannel(), 0.0
        self.outlet = ViewOutlet(self.machine.scheduler, cast(Any, self.channel))
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now_s)

    def step(self, seconds: float) -> None:
        """A step that takes so long."""
        self.machine.step()
        self.now_s += seconds
        self.outlet.send_due(not self.machine.scheduler.has_unfinished)

    def check(self) -> None:
        """The frames so far give the engine's own state."""
        view = ViewState()
        for frame in self.channel.sent:
            for bundle in json.loads(frame.text):
                view.apply(bundle)
        self.machine.view = view
        self.machine.check_view()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    one = Watched(monkeypatch)
    one.machine.add([1] * 20, 8)
    one.machine.add([1] * 8 + [2] * 9, 8)
    return one


def test_nothing_is_done_while_nobody_watches(watched: Watched) -> None:
    watched.step(1.0)
    assert not any(watched.machine.scheduler.events.listeners.values())
    assert watched.machine.scheduler.cache.prefix.changes is None
    assert watched.channel.sent == [] and watched.outlet.wait_s() is None
    watched.outlet.watch(True)
    watched.outlet.watch(False)
    assert not any(watched.machine.scheduler.events.listeners.values())
    watched.step(1.0)
    assert [frame.kind for frame in watched.channel.sent] == ["restart"]


def test_frames_come_20_times_a_second_and_whatever_is_left_when_idle(watched: Watched) -> None:
    watched.outlet.watch(True)
    for _ in range(6):
        watched.step(0.02)
    frames = [(frame.kind, len(json.loads(frame.text))) for frame in watched.channel.sent]
    assert frames == [("restart", 1), ("changes", 3), ("changes", 3)]
    while watched.machine.scheduler.has_unfinished:
        watched.step(0.001)
    assert watched.outlet.wait_s() == pytest.approx(0.05, abs=0.02)
    watched.now_s += 0.05
    watched.outlet.send_due(True)
    assert watched.outlet.wait_s() is None
    watched.check()
    watched.machine.scheduler.cache.reset_prefix_cache()  # between steps, of an idle engine
    watched.now_s += 0.05
    watched.outlet.send_due(True)
    assert json.loads(watched.channel.sent[-1].text)[0]["kv_events"]
    watched.check()


def test_whole_states_continue_the_changes_before_them(watched: Watched) -> None:
    """Who has seen all changes may leave a state out, and who begins with it sees the same."""
    watched.outlet.watch(True)
    for _ in range(3):
        watched.step(0.001)
    watched.outlet.watch(True)
    for _ in range(3):
        watched.step(0.06)
    sent = watched.channel.sent
    assert [one.kind for one in sent] == ["restart", "changes", "state", *["changes"] * 3]
    watched.check()
    watched.channel.sent = [sent[0], sent[1], *sent[3:]]
    watched.check()
    watched.channel.sent = sent[2:]
    watched.check()


def test_frames_that_nobody_takes_are_lost_and_made_good(watched: Watched) -> None:
    watched.outlet.watch(True)
    watched.channel.backlog = MOST_BACKLOG + 1
    for _ in range(3):
        watched.step(0.06)
    assert len(watched.channel.sent) == 1
    assert not any(watched.machine.scheduler.events.listeners.values())
    watched.channel.backlog = 0
    watched.step(0.06)
    watched.step(0.06)
    assert [one.kind for one in watched.channel.sent] == ["restart", "restart", "changes"]
    watched.check()


def test_watching_anew_while_frames_are_lost(watched: Watched) -> None:
    watched.outlet.watch(True)
    watched.channel.backlog = MOST_BACKLOG + 1
    watched.step(0.0)
    watched.outlet.watch(True)
    assert len(watched.channel.sent) == 1
    watched.channel.backlog = 0
    watched.step(0.06)
    assert [one.kind for one in watched.channel.sent] == ["restart", "restart"]
