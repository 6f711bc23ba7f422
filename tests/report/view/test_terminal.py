"""What the terminal shows of steps, and how it leaves the terminal."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from minivllm.engine.batching import Continuous
from minivllm.report.view.terminal import TerminalView, colour, follow, replay
from tests.engine.imaginary import make
from tests.report.view.recording import recorded_slowly

ENTERS, LEAVES, SHOWS_CURSOR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[?25h"


@pytest.fixture(scope="module")
def items() -> list[Any]:
    """A run whose requests wait for blocks and are preempted."""
    machine = make(Continuous(4, 8, watermark=0), blocks=10)
    items = recorded_slowly(machine)
    for index in range(6):
        machine.add([index + 1] * (5 + index), 8)
    machine.run()
    return items


def shown(items: list[Any], width: int = 100, height: int = 30) -> list[str]:
    view = TerminalView("a run")
    for item in items:
        view.take(item)
    console = Console(width=width, height=height, file=io.StringIO(), color_system=None)
    with console.capture() as capture:
        console.print(view.frame(width, height - 1))
    return capture.get().splitlines()


def lane(lines: list[str], request_id: str) -> str:
    return next(line for line in lines if line.startswith(f"{request_id} "))


def test_lanes_say_what_each_request_spends_its_time_on(items: list[Any]) -> None:
    until = next(i for i, item in enumerate(items) if "preempted" in item)
    lines = shown(items[: until + 1])
    number = items[until]["preempted"][0][0]
    assert f"step {items[until]['step']} " in lines[0]
    assert "x preempted" in lines[1] and "swapped" not in lines[1]
    assert "x" in lane(lines, f"{number}.0") and "P" in lane(lines, f"{number}.0")
    assert "█" in lane(lines, "0.0") and "·" in lane(lines, "5.0")
    assert any(f"Request {number} preempted for request" in line for line in lines[-4:])


def test_requests_that_end_together_stay_in_sight_where_there_is_room() -> None:
    machine = make(Continuous(16, 64), blocks=64)
    items = recorded_slowly(machine)
    for index in range(12):
        machine.add([index + 1] * 4, 3)
    machine.run()
    lines = shown(items, height=40)
    assert all(lane(lines, f"{number}.0") for number in range(12))
    assert len(shown(items, height=16)) == 15


def test_a_shared_block_and_a_cached_one_are_marked() -> None:
    machine = make(Continuous(4, 64), blocks=12, prefix_caching=True)
    items = recorded_slowly(machine)
    machine.add([1] * 9, 2)
    machine.run()
    grid = shown(items)[-6]
    assert grid.strip("·") == "░░" and len(grid) == 12
    machine.add([1] * 9, 4)
    machine.add([1] * 9, 4)
    machine.step()
    grid = shown(items)[-6]
    assert grid.count("#") == 2 and grid.count("█") == 2


def test_a_large_pool_has_several_blocks_a_character(items: list[Any]) -> None:
    facts = {**items[0]["engine"], "num_blocks": 40_000}
    lines = shown([{**items[0], "engine": facts}, *items[1:5]], height=24)
    assert any("blocks, 80 a character" in line for line in lines) and len(lines) == 23


@pytest.mark.parametrize("height", [12, 20, 40])
def test_a_frame_fits_the_screen(items: list[Any], height: int) -> None:
    for count in (1, 6, len(items)):
        lines = shown(items[:count], width=60, height=height)
        assert len(lines) <= height - 1 and max(map(len, lines)) <= 60
    few = shown(items[:6], height=12)
    assert any("more requests" in line for line in few)


def test_a_replay_takes_the_screen_and_gives_it_back(items: list[Any]) -> None:
    out = io.StringIO()
    replay("a run", items, 1e9, Console(file=out, force_terminal=True, width=100, height=30))
    text = out.getvalue()
    assert text.count(ENTERS) == text.count(LEAVES) == 1
    assert text.rindex(SHOWS_CURSOR) > text.rindex("\x1b[?25l")
    assert "is done" in text[text.index(LEAVES) :]  # the last frame stays


def test_ctrl_c_gives_it_back_too(items: list[Any]) -> None:
    def interrupted() -> Iterator[list[Any]]:
        yield items[:4]
        raise KeyboardInterrupt

    out = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        follow("ws://x", interrupted(), Console(file=out, force_terminal=True, width=99, height=30))
    text = out.getvalue()
    assert text.index(ENTERS) < text.index(LEAVES)
    assert text.rindex(SHOWS_CURSOR) > text.rindex("\x1b[?25l")


def test_a_file_gets_the_last_frame_at_once(items: list[Any]) -> None:
    out = io.StringIO()
    replay("a run", items, 1e-9, Console(file=out, width=100, height=30))
    assert "\x1b" not in out.getvalue() and out.getvalue().count("a run") == 1


def test_gauges_show_nowhere_and_a_server_may_be_joined_at_any_time(items: list[Any]) -> None:
    gauges = {"gauges": {"time_s": 0.0, "memory_bytes": 1}}
    assert shown([gauges]) == ["a run  0 running  0 waiting", "waiting for the first step"]
    out = io.StringIO()
    follow("ws://x", [[gauges], items[:9], items[:5]], Console(file=out, width=100, height=30))
    assert "a run" not in out.getvalue() and "ws://x" in out.getvalue()


def test_a_request_has_one_colour_and_the_next_one_another() -> None:
    assert colour(3) == colour(3) and len({colour(number) for number in range(50)}) == 50
