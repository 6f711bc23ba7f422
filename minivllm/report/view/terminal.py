"""Recorded or live steps in the terminal: lanes of requests, the grid of blocks, and decisions."""

from __future__ import annotations

import colorsys
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minivllm.analysis.format import count
from minivllm.report.view.account import Account, Life
from minivllm.report.view.state import ViewState
from minivllm.report.view.why import duration, words
from minivllm.report.view.words import sentences

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.text import Text

# A letter and a colour for each part of an account, so that colour alone says nothing.
LOOKS = {
    "client": (" ", "default"),
    "http": ("h", "bright_black"),
    "unseen": ("?", "bright_black"),
    "queued": ("·", "bright_black"),
    "blocks": ("b", "yellow"),
    "disk": ("d", "yellow"),
    "preempted": ("x", "red"),
    "swapped": ("s", "red"),
    "recompute": ("R", "magenta"),
    "stalled": ("-", "yellow"),
    "prefill": ("P", "blue"),
    "decode": ("█", "green"),
}
PAINT_S = 0.1  # between two frames
ENDED = 100  # requests that stay in sight after their end, where there is room
DECISIONS = 4  # lines of the latest step
LEVELS = " ▁▂▃▄▅▆▇█"  # how full a cell of several blocks is
LABEL = 12  # characters of a request's name


class TerminalView:
    """The state after the items so far, as lines of text.

    Args:
        title: of the recording, or the server's address.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._state, self._account = ViewState(), Account(keep_spans=True)
        # start and end of the latest steps, seconds
        self._steps: deque[tuple[float, float]] = deque(maxlen=1000)
        self._ended: deque[int] = deque(maxlen=ENDED)
        self._last: Mapping[str, Any] = {}
        self._num_tokens: deque[int] = deque(maxlen=20)  # computed in the latest steps

    def take(self, item: Mapping[str, Any]) -> None:
        """Apply the next item; gauges show nowhere."""
        self._account.take(item)
        if "time_s" not in item:
            return
        for ended in self._state.apply(item):  # type: ignore[arg-type]
            self._forget()
            self._ended.append(ended.new.number)
        if "step" in item or "engine" in item:
            self._last = item
        if "step" in item:
            self._steps.append((item["time_s"], item["end_s"]))
            computed = sum(part[2] for part in item.get("scheduled", ()))
            self._num_tokens.append(computed + len(item.get("decoded", ())))

    def _forget(self) -> None:
        """Make room among those that have ended: of a server they would be ever more."""
        if len(self._ended) == ENDED:
            self._account.lives.pop(self._ended[0], None)

    @property
    def has_begun(self) -> bool:
        """Whether there is a step to show."""
        return self._state.engine is not None

    def frame(self, width: int, height: int) -> Group:
        """The lines of a screen of this size."""
        from rich.console import Group
        from rich.text import Text

        if not self.has_begun:
            return Group(self._head(), Text("waiting for the first step"))
        lines = [Text(one, no_wrap=True, overflow="ellipsis") for one in self._decisions()]
        lines += [Text("")] * (DECISIONS - len(lines))
        room = max(2, height - DECISIONS - 4)  # without headings, legend and rule
        most = max(1, room // 3)
        grid = self._grid(width, most)
        lanes = self._lanes(width, room - len(grid))
        seen = {part for life in self._account.lives.values() for part in life.ms}
        parts = (part for part in LOOKS if part in seen)
        legend = "  ".join(f"{LOOKS[part][0]} {words()['parts'][part]}" for part in parts)
        return Group(
            self._head(),
            Text(legend, style="dim", no_wrap=True, overflow="ellipsis"),
            *lanes,
            Text(self._grid_heading(width, most), style="dim", no_wrap=True),
            *grid,
            Text("─" * width, style="dim"),
            *lines,
        )

    def _head(self) -> Text:
        from rich.text import Text

        running = sum(one.state in ("prefill", "decode") for one in self._state.requests.values())
        parts = [f"{running} running", f"{self._state.num_waiting} waiting"]
        if self._state.engine is not None:
            total = self._state.engine["num_blocks"]
            parts.append(f"{self._state.num_used_blocks}/{total} blocks")
        recent = [*self._steps][-len(self._num_tokens) :]
        if recent and recent[-1][1] > recent[0][0]:
            rate = sum(self._num_tokens) / (recent[-1][1] - recent[0][0])
            parts.append(f"{rate:.0f} tokens/s computed")
        if "step" in self._last:
            parts.insert(0, f"step {self._last['step']}")
        text = Text(no_wrap=True, overflow="ellipsis")
        return text.append(self._title, style="bold").append("  " + "  ".join(parts))

    def _decisions(self) -> list[str]:
        texts = sentences(self._last, self._state.engine)
        return [one.text for one in texts[:DECISIONS]]

    def _lanes(self, width: int, rows: int) -> list[Text]:
        """A line for each request, as far as there is room: first those that have begun, then those
        that wait, then those that have ended."""
        from rich.text import Text

        lives, unfinished = self._account.lives, self._state.requests
        numbers = sorted(unfinished, key=lambda number: unfinished[number].state == "waiting")
        hidden = len(numbers) - rows + 1 if len(numbers) > rows else 0
        numbers = numbers[: rows - 1] if hidden else numbers
        ended = [number for number in self._ended if number in lives]
        free = rows - len(numbers) - bool(hidden)
        numbers = sorted(numbers + ended[max(0, len(ended) - free) :])
        columns = max(10, width - LABEL - 11)
        recent = [*self._steps][-columns:] or [(0.0, 0.0)]
        start_s, end_s = recent[0][0], max(recent[-1][1], recent[0][0] + 1e-6)
        lines = []
        for number in numbers:
            life = lives[number]
            line = Text(no_wrap=True)
            line.append(_short(life.new.request_id), style=colour(number))
            _lane(line, life, start_s, end_s, columns)
            total = sum(life.ms.values())
            line.append(f" {duration(total):>9}", style="dim" if life.end_s is None else "bold")
            lines.append(line)
        if hidden:
            lines.append(Text(f"and {count(hidden, 'more request')}", style="dim"))
        return [*lines, *[Text("")] * (rows - len(lines))]

    def _cell(self, width: int, rows: int) -> int:
        """Blocks that one character stands for."""
        assert self._state.engine is not None
        return -(-self._state.engine["num_blocks"] // (width * rows))

    def _grid_heading(self, width: int, rows: int) -> str:
        each = self._cell(width, rows)
        if each > 1:
            return f"blocks, {each} a character: how full, in the colour of most of them"
        return "blocks: █ of one request  # shared  ░ free, but cached  · free"

    def _grid(self, width: int, rows: int) -> list[Text]:
        """Every block, by its place in the pool."""
        from rich.text import Text

        assert self._state.engine is not None
        owners: dict[int, list[int]] = {}
        for number, one in self._state.requests.items():
            for block in one.blocks:
                owners.setdefault(block, []).append(number)
        each, last = self._cell(width, rows), self._state.engine["num_blocks"]
        line, lines = Text(no_wrap=True), []
        for first in range(1, last + 1, each):
            cell = range(first, min(first + each, last + 1))
            line.append(*self._styles(cell, owners))
            if len(line) == width:
                lines.append(line)
                line = Text(no_wrap=True)
        return [*lines, line] if len(line) else lines

    def _styles(self, cell: range, owners: Mapping[int, Sequence[int]]) -> tuple[str, str]:
        held = [block for block in cell if block in owners]
        if len(cell) == 1:
            if not held:
                return ("░" if cell[0] in self._state.cached else "·"), "bright_black"
            first, *others = owners[cell[0]]
            return ("#" if others else "█"), colour(first)
        if not held:
            return LEVELS[0], "default"
        most = Counter(number for block in held for number in owners[block]).most_common(1)[0][0]
        return LEVELS[max(1, len(held) * (len(LEVELS) - 1) // len(cell))], colour(most)


def _short(name: str) -> str:
    return f"{name[: LABEL - 1]:<{LABEL}}"


def _lane(line: Text, life: Life, start_s: float, end_s: float, columns: int) -> None:
    """Append a character a stretch of time: what most of it was spent on, gaps between steps
    aside."""
    spent: list[dict[str, float]] = [{} for _ in range(columns)]
    width_s = (end_s - start_s) / columns
    for span in reversed(life.spans):
        if span.end_s <= start_s:
            break
        if span.part == "between":
            continue
        first = max(0, int((span.start_s - start_s) / width_s))
        last = min(columns - 1, int((span.end_s - start_s) / width_s))
        for column in range(first, last + 1):
            begin_s = start_s + column * width_s
            part_s = min(span.end_s, begin_s + width_s) - max(span.start_s, begin_s)
            spent[column][span.part] = spent[column].get(span.part, 0.0) + part_s
    for parts in spent:
        if parts:
            line.append(*LOOKS[max(parts, key=lambda part: parts[part])])
        else:
            line.append(" ")


def colour(number: int) -> str:
    """The colour of a request, the same in every view of it: hues by the golden ratio."""
    red, green, blue = colorsys.hls_to_rgb(number * 0.618034 % 1, 0.6, 0.65)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def replay(title: str, items: Iterable[Mapping[str, Any]], speed: float, console: Console) -> None:
    """Show items at the pace at which they happened, and leave the last frame on the terminal.

    What is no terminal gets the last frame alone, at once.

    Args:
        title: of the recording.
        items: in the order of their time.
        speed: 2 is twice as fast as it was.
        console: where.
    """
    view, first_s, begin_s = TerminalView(title), None, time.monotonic()
    with _Painter(view, console) as painter:
        for item in items:
            time_s = item["gauges"]["time_s"] if "gauges" in item else item["end_s"]
            first_s = time_s if first_s is None else first_s
            if console.is_terminal:
                painter.wait((time_s - first_s) / speed - (time.monotonic() - begin_s))
            view.take(item)
            painter.paint()


def follow(title: str, batches: Iterable[Iterable[Mapping[str, Any]]], console: Console) -> None:
    """Show items as they come, until there are no more.

    Args:
        title: where they come from.
        batches: the items of a message each.
        console: where.
    """
    view = TerminalView(title)
    with _Painter(view, console) as painter:
        for items in batches:
            for item in items:
                view.take(item)
            painter.paint()


class _Painter:
    """Paints frames, not too often. As a context manager it has the screen to itself, and gives it
    back however it ends, with the last frame below what was there.

    Args:
        view: what to paint.
        console: where.
    """

    def __init__(self, view: TerminalView, console: Console) -> None:
        from rich.live import Live

        self._view, self._console = view, console
        self._next_s = 0.0
        self._live = Live(console=console, screen=True, auto_refresh=False)

    def __enter__(self) -> _Painter:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        if self._view.has_begun:
            self._console.print(self._frame())

    def _frame(self) -> Group:
        size = self._console.size
        return self._view.frame(size.width, size.height - 1)

    def wait(self, seconds: float) -> None:
        """Paint, then let so much time pass."""
        if seconds > PAINT_S:
            self.paint(force=True)
        if seconds > 0:
            time.sleep(seconds)

    def paint(self, force: bool = False) -> None:
        """Paint a frame unless the last one was just painted."""
        now = time.monotonic()
        if self._live.is_started and (force or now >= self._next_s):
            self._next_s = now + PAINT_S
            self._live.update(self._frame(), refresh=True)
