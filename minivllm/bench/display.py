"""What a person sees while measurements run: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from minivllm.bench.records import storage
from minivllm.bench.records.measurement import DEFAULT_ARM
from minivllm.platform.untrusted import printable

ProgressEvent = dict[str, Any]
PHASES = {
    "waiting": "waiting for the device, which another run is using",
    "loading": "loading",
    "probing": "probing the hardware's limits",
    "warmup": "warming up",
    "measuring": "measuring",
    "reference": "computing the reference that quality is compared with",
    "quality": "measuring quality",
    "finishing": "writing the record",
    "profiling": "tracing some steps",
}


class Display:
    """A context manager whose `update` takes the supervisor's events.

    Args:
        offset: measurements of the same sweep that came before these.
        total: measurements in all; None takes what the events say, where they know.
        console: where to print.
    """

    def __init__(
        self, offset: int = 0, total: int | None = None, console: Console | None = None
    ) -> None:
        self.console = console or Console(highlight=False)
        self._offset = offset
        self._total = total
        self._began = time.monotonic()
        self._last = ("", "")  # run and phase of the last plain line
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Display:
        if self.console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[rate]}", markup=False),
                TextColumn("{task.fields[left]}", markup=False),
                console=self.console,
                transient=True,
            )
            self._task = self._progress.add_task("starting", total=None, rate="", left="")
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def update(self, event: ProgressEvent) -> None:
        """Show one event."""
        measurement, name = event["measurement"], event["event"]
        position, total = self._offset + event["position"], self._total or event["total"] or 0
        head = f"[{position}/{total or '?'}] {measurement.cell}"
        # Several arms may have a cell's name in common.
        if measurement.arm not in ("", DEFAULT_ARM, measurement.cell):
            head += f" ({measurement.arm})"
        if (repeats := measurement.settings.measure.repeats) > 1:
            # more than `measure.repeats`, where measure.target_ci adds some
            block = measurement.block + 1
            head += f", repeat {block}/{repeats}" if block <= repeats else f", repeat {block}"
        phase = f"{PHASES.get(name, name)}{': ' + event['holder'] if event.get('holder') else ''}"
        if name in ("done", "failed"):
            style = "green" if name == "done" else "red"
            message = f": {printable(event['message'])}" if event.get("message") else ""
            if event.get("at"):  # what was raised, and where: the rest is in the log
                message = (
                    f": {event['type']}{message} ({event['at']}; log: "
                    f"{measurement.path / storage.LOG})"
                )
            self.console.print(
                Text.assemble(head, " ", (event["status"], style), message), soft_wrap=True
            )
        elif self._progress is None:
            if self._last != (measurement.run_id, name):
                self.console.print(Text(f"{head} {phase}"), soft_wrap=True)
                self._last = (measurement.run_id, name)
        else:
            self._show(f"{head} {phase}", event, position, total)

    def _show(self, description: str, event: ProgressEvent, position: int, total: int) -> None:
        assert self._progress is not None and self._task is not None
        tokens, total_tokens, elapsed = (
            event.get("tokens"),
            event.get("total_tokens"),
            event.get("elapsed_s"),
        )
        rate, left, share = "", "", 0.0
        filled: float | None = None  # of the bar; None: unknown
        if tokens and total_tokens and elapsed:
            share = min(1.0, tokens / total_tokens)
            rate, left = (
                f"{tokens / elapsed:.0f} tok/s",
                f"{_clock(elapsed / share - elapsed)} left",
            )
        if event["event"] == "finishing":
            share = 1.0
        if event["event"] in ("measuring", "quality", "finishing"):
            filled = share
        elif to_load := event.get("to_load"):
            filled = event["loaded"] / to_load
            description += f" {int(100 * filled)} %"
        done = position - 1 - self._offset + share
        if total > 1 and done > 0.5:
            spent = time.monotonic() - self._began
            left += f", all in {_clock(spent / done * (total - self._offset - done))}"
        # to update(), None is "as it was"
        self._progress.tasks[0].total = None if filled is None else 1.0
        self._progress.update(
            self._task,
            description=description,
            completed=filled or 0.0,
            rate=rate,
            left=left.removeprefix(", "),
        )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
