"""Clocks: a window in which they did not go alike is told."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from minivllm.bench.hardware.clock import Clock, Reading

BEFORE = Reading(monotonic=50.0, counter=7.0, wall=1.7e9, boot=90.0)


def after(monotonic: float, counter: float, wall: float, boot: float | None) -> Reading:
    return Reading(
        50.0 + monotonic, 7.0 + counter, 1.7e9 + wall, None if boot is None else 90.0 + boot
    )


@pytest.mark.parametrize(
    ("later", "message"),
    [
        (after(10.0, 10.0, 10.0, 10.0), None),
        (after(10.0, 10.004, 10.004, 10.004), None),  # as slow as reading them one by one may be
        (after(10.0, 10.0, 3610.0, 10.0), None),  # the time of day was set
        (after(13.0, 10.0, 10.0, 10.0), "went 13.00 s and the performance counter 10.00 s"),
        (after(-3.0, 10.0, 10.0, 10.0), "went -3.00 s and the performance counter 10.00 s"),
        # suspended
        (after(10.0, 10.0, 70.0, 70.0), "went 10.00 s and the clock since booting 70.00 s"),
        (after(13.0, 13.0, 10.0, 10.0), "went 13.00 s and the clock since booting 10.00 s"),
        (after(10.0, 10.0, 70.0, None), "went 10.00 s and the time of day 70.00 s"),
    ],
)
def test_clocks_that_do_not_go_alike(later: Reading, message: str | None) -> None:
    before = replace(BEFORE, boot=None) if later.boot is None else BEFORE
    found = before.jumped(later)
    assert found is None if message is None else message in (found or "")


def test_the_clocks_of_this_machine_go_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Reading.take()
    assert before.jumped(Reading.take()) is None
    monkeypatch.setattr(Clock, "now", staticmethod(lambda: time.monotonic() + 5))
    assert "went 5.0" in (before.jumped(Reading.take()) or "")
