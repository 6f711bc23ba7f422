"""What is compared: the throughput, or the latencies where the arrivals of the load set the
throughput.

This is the one rule: sweeps, ablations, comparisons of runs, searches, pages and the terminal ask
here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.analysis.cell import Cell
from minivllm.analysis.format import listing
from minivllm.analysis.rows import Row, below, number, open_loop
from minivllm.bench.workloads import arrivals
from minivllm.errors import BadInput

THROUGHPUT = "output_tokens_per_s"
# What counts work over time, so that arrivals can set it. Goodput and joules a token are the
# engine's at any load.
PACED = (THROUGHPUT, "total_tokens_per_s", "requests_per_s", "duration_s")
# End-to-end first: it holds the other two, so that no change passes it by.
LATENCIES = ("e2e_ms.p50", "ttft_ms.p50", "itl_ms.p50")
NAMES = {
    THROUGHPUT: "output tokens/s",
    "e2e_ms.p50": "E2E p50",
    "ttft_ms.p50": "TTFT p50",
    "itl_ms.p50": "ITL p50",
}
KEPT_UP = 0.9  # of the rate of arrival, served while requests still came
# share of the window that a request waits on average, beyond which a queue had grown
WAITING = 0.05


@dataclass(frozen=True)
class Ranking:
    """What cells are compared by.

    Args:
        metrics: names below `metrics` of a record, the first the one that ranks.
        paced: whether the load's own pace sets the throughput of some of the cells.
        behind: labels of the cells that did not keep up with the pace of their load.
        cells: how many there are.
    """

    metrics: tuple[str, ...]
    paced: bool
    behind: tuple[str, ...]
    cells: int

    def sets(self, metric: str) -> bool:
        """Whether the arrivals set this figure, so that it says little of the engine."""
        return self.paced and metric.removeprefix("metrics.").removeprefix("steady.") in PACED

    @property
    def notes(self) -> list[str]:
        """Sentences on what the pace of the load makes of the figures; none where there is no such
        pace."""
        notes = []
        if self.paced:
            notes.append(
                "Requests came at the load's own pace and were kept up with, so the load sets "
                "the throughput: compare latencies, not tokens/s."
            )
        if not self.behind:
            return notes
        if len(self.behind) == self.cells:
            who = "No cell" if self.cells > 1 else "The cell did not"
            verb = " kept" if self.cells > 1 else " keep"
            return [
                f"{who}{verb} up with the pace of its requests, so the throughput is the "
                "engine's own, and latencies grow for as long as requests come."
            ]
        whose = "its" if len(self.behind) == 1 else "their"
        notes.append(
            f"Not kept up with by {listing(list(self.behind), 4)}: there the throughput is the "
            f"engine's own, and {whose} latencies grow for as long as requests come."
        )
        return notes

    def notice(self, metric: str) -> str | None:
        """A sentence about a metric that was requested although the arrivals set it; None where
        they do not."""
        if not self.sets(metric):
            return None
        return (
            f"{metric} was asked for, and the load sets it: requests came at a pace of their own "
            f"that was kept up with, so that it says little of the engine; {LATENCIES[0]} is "
            "compared where no metric is named."
        )


def rank(cells: Sequence[Cell]) -> Ranking:
    """What is compared among the cells.

    Throughput, unless every cell's load has a pace of its own (a rate of arrival, users who think)
    and some cell kept up with it: the throughput of that one is the load's, not the engine's, and
    latencies are compared.
    """
    kept = [keeps_up(cell) for cell in cells]
    behind = tuple(cell.mention for cell, well in zip(cells, kept, strict=True) if well is False)
    paced = any(kept)
    by_latency = paced and None not in kept
    return Ranking(LATENCIES if by_latency else (THROUGHPUT,), paced, behind, len(cells))


def caution(objective: str, row: Row) -> str | None:
    """What to say before a search for a figure that the arrivals may set; None where they cannot.

    Args:
        objective: its dotted name in a record.
        row: the configuration that is searched, flattened as a record's.
    """
    if not Ranking((), True, (), 1).sets(objective) or (
        open_loop(row) is None and _think_s(row) is None
    ):
        return None
    return (
        f"sweep.objective={objective}: requests come at the load's own pace, which sets it "
        "wherever an engine keeps up; search by sweep.direction=minimize "
        f"sweep.objective=metrics.{LATENCIES[0]}, or use arrival=concurrency"
    )


def keeps_up(cell: Cell) -> bool | None:
    """Whether the load's own pace sets the cell's throughput: it has one and the engine kept up
    with it.

    Returns:
        None where the load has no pace of its own, as with all requests at once or a closed loop;
        True also where the records cannot say.
    """
    rows = cell.timed or cell.rows
    think_s = _think_s(rows[0])
    if open_loop(rows[0]) is None and think_s is None:
        return None
    e2e_s = _seconds(cell, "e2e_ms")
    if think_s is not None and open_loop(rows[0]) is None:
        return e2e_s is None or think_s >= e2e_s
    return not _behind(cell, rows, e2e_s)


def _think_s(row: Row) -> float | None:
    """Mean seconds between a user's turns; None without think time."""
    think_s = number(row.get("config.workload.think_s"))
    return think_s if think_s and row.get("config.workload.turns") != 1 else None


def _behind(cell: Cell, rows: Sequence[Row], e2e_s: float | None) -> bool:
    """Whether requests came faster than they were served."""
    window_s, served = cell.mean("metrics.duration_s"), cell.mean("metrics.requests_per_s")
    spans = [span for row in rows if (span := _arriving_s(row)) is not None]
    arriving_s = math.fsum(spans) / len(spans) if spans else None
    served_s, limit_s = window_s, number(rows[0].get("config.measure.duration_s"))
    if arriving_s is not None and limit_s is not None and arriving_s > limit_s:
        # The measurement ended by time, before the requests that were due within it.
        arriving_s, served_s = limit_s, cell.mean("metrics.counted.served_s")
    if served_s and arriving_s is not None:
        # The last request's latency lies in the window, too, and is no sign of a queue.
        draining_s = served_s - arriving_s
        own_s = min(e2e_s, draining_s) if e2e_s is not None else 0.0
        return own_s > arriving_s or arriving_s < KEPT_UP * (served_s - own_s)
    waiting_s = _seconds(cell, "queue_ms") or _seconds(cell, "ttft_ms")
    if window_s and waiting_s is not None:
        return waiting_s > WAITING * window_s
    rate = number(rows[0].get("config.arrival.rate"))
    return served is not None and rate is not None and served < KEPT_UP * rate


def _seconds(cell: Cell, metric: str) -> float | None:
    """The mean of a latency, or its median where that is not recorded, in seconds."""
    mean = cell.mean(f"metrics.{metric}.mean")
    value = cell.mean(f"metrics.{metric}.p50") if mean is None else mean
    return None if value is None else value / 1e3


def _arriving_s(row: Row) -> float | None:
    """Seconds from the first arrival to the last, drawn again; None where the record alone cannot
    say."""
    module, _, name = str(row.get("config.arrival._target_") or "").rpartition(".")
    count = row.get("config.workload.num_requests") or row.get("metrics.num_requests")
    known = module == arrivals.__name__ and name != arrivals.Replay.__name__
    if (
        not known
        or not isinstance(count, int)
        or count < 1
        or row.get("config.workload.turns") is not None
    ):
        return None
    knobs = {key: value for key, value in below(row, "config.arrival").items() if key != "_target_"}
    try:
        return arrivals_of(name, knobs, count, int(number(row.get("config.measure.seed")) or 0))
    except (BadInput, TypeError, ValueError):
        return None  # knobs of another version


def arrivals_of(name: str, knobs: dict[str, Any], num_requests: int, seed: int) -> float:
    """When the last of so many requests is due, in seconds."""
    process: arrivals.Arrival = getattr(arrivals, name)(**knobs)
    return process.schedule(num_requests, seed)[-1]
