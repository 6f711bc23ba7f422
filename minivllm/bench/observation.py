"""measure.events: what the engine under test tells of its steps within the measured window."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from minivllm.bench.options import MeasureOptions
from minivllm.bench.records.record import RecordedEvents
from minivllm.config.groups import Config
from minivllm.engines.base import BenchEngine, Observable, ObservableEngine
from minivllm.errors import BadInput
from minivllm.extras.observation.bundle import StepBundle
from minivllm.platform.plug_ins import locate


class EventRecorder:
    """Keeps bundles as JSON until they take too much room; from then on it counts them.

    Args:
        most_bytes: of the text that is kept.

    Attributes:
        lines: a bundle each.
    """

    def __init__(self, most_bytes: float) -> None:
        self.lines: list[bytes] = []
        self._room = most_bytes
        self._num_left_out = 0
        self._unix_s = time.time() - time.monotonic()

    def __call__(self, bundle: StepBundle) -> None:
        """Keep the next bundle. Once one was left out so are all that follow, since each continues
        the one before."""
        line = json.dumps(bundle, separators=(",", ":")).encode()
        self._room -= len(line) + 1
        if self._room < 0:
            self._room = -1
            self._num_left_out += 1
        else:
            self.lines.append(line)

    def recorded(self, simulated: bool) -> RecordedEvents:
        """What the record says of them."""
        unix_s = None if simulated else self._unix_s
        return RecordedEvents(len(self.lines), self._num_left_out, unix_s)

    @property
    def note(self) -> str:
        """What a reader of the record has to know."""
        if not self._num_left_out:
            return "measure.events: the steps were observed, which takes time of each"
        return (
            f"measure.events: the last {self._num_left_out} of "
            f"{self._num_left_out + len(self.lines)} events were left out, since they exceed "
            "measure.events_mb"
        )


def validate(config: dict[str, Any]) -> None:
    """Raise BadInput, before an engine is built, if its events are wanted and its class has
    none."""
    view = Config.of(config)
    # What a function returns is known only when it is built, see `observed`.
    if (
        view.measure.events
        and isinstance(kind := locate(view.target("engine")), type)
        and not issubclass(kind, Observable)
    ):
        raise _rejection((config.get("choices") or {}).get("engine") or view.target("engine"))


def _rejection(name: str) -> BadInput:
    return BadInput(
        f"measure.events=true is not supported by engine={name}, whose steps cannot be seen from "
        "outside: use engine=minivllm or engine=simulated, or measure.events=false"
    )


@contextmanager
def observed(engine: BenchEngine, measure: MeasureOptions) -> Iterator[EventRecorder | None]:
    """Record the engine's events while the context is open, if `measure.events` asks for them.

    Raises:
        BadInput: it has none.
    """
    if not measure.events:
        yield None
        return
    if not isinstance(engine, ObservableEngine):
        raise _rejection(engine.info.name)
    recorder = EventRecorder(measure.events_mb * 1e6)
    observer = engine.observe(recorder)
    try:
        yield recorder
    finally:
        observer.close()
