"""Ranks that answer, fall silent or hang up, without a rank."""

from __future__ import annotations

from itertools import count
from multiprocessing import Pipe
from queue import Queue

import pytest

from minivllm.errors import Crashed
from minivllm.parallel import watch
from minivllm.parallel.watch import RankWatch
from minivllm.platform.processes.heartbeat import BEAT_S, SILENT_S, Beat, Silence


def test_answers_come_beside_signs_of_life() -> None:
    ours, theirs = Pipe()
    lost: Queue[tuple[int, str, bool]] = Queue()
    one = RankWatch({1: ours}, lambda *what: lost.put(what))
    for message in (Beat(), {"blocks": 5}, Beat(), "more"):
        theirs.send(message)
    assert [one.answer(1), one.answer(1)] == [{"blocks": 5}, "more"]
    one.close()
    assert lost.empty()


def test_a_rank_that_hangs_up_is_lost_and_the_others_are_read() -> None:
    pipes = [Pipe() for _ in range(2)]
    lost: Queue[tuple[int, str, bool]] = Queue()
    one = RankWatch({rank: ours for rank, (ours, _) in enumerate(pipes, 1)}, lambda *a: lost.put(a))
    pipes[0][1].close()
    assert lost.get(timeout=10) == (1, "has ended its connection", False)
    with pytest.raises(Crashed, match="rank 1 has ended its connection"):
        one.answer(1)
    pipes[1][1].send(7)
    assert one.answer(2) == 7
    one.close()


def test_a_silent_rank_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look is 1 ms, and half a second of the clock."""
    monkeypatch.setattr(watch, "BEAT_S", 0.001)
    ticks = count()
    ours, theirs = Pipe()
    lost: Queue[tuple[int, str, bool]] = Queue()
    one = RankWatch(
        {1: ours}, lambda *a: lost.put(a), lambda _: Silence(SILENT_S, lambda: BEAT_S * next(ticks))
    )
    assert lost.empty()  # it has not begun to beat
    theirs.send(Beat())
    assert lost.get(timeout=10) == (1, "has not answered for 8 s", True)
    one.close()
