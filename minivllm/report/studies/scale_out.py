"""What several replicas and devices give: speed per device, and what routing keeps of the prefix
cache."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.analysis.cell import Cell
from minivllm.analysis.format import MISSING, count, interval, listing, ratio, sig
from minivllm.analysis.interleaving import caveat, interval_text, marked, relative
from minivllm.analysis.rows import number
from minivllm.analysis.statistics import Estimate
from minivllm.report.figures.chart import Chart
from minivllm.report.figures.opening import ForestRow, forest
from minivllm.report.html import Conclusion
from minivllm.report.inputs import ReportInputs
from minivllm.report.studies.base import PageTable, Study
from minivllm.report.verdict import remarks

SPEED = "metrics.output_tokens_per_s"
REUSED, LOOKED_UP = (f"liveness.cache.prefix_tokens_{what}" for what in ("reused", "looked_up"))
CACHED, COUNTED = "liveness.cache.cached_prompt_tokens", "liveness.stream.prompt_tokens_counted"
# What one engine that is compared with several may have otherwise: as many blocks as all of them.
BLOCKS = "cache.num_blocks"
APART = (
    *("choices.parallel", "config.parallel.", f"config.{BLOCKS}"),
    *("config.engine.url", "config.engine.router"),  # of servers that engine=openai asks
)
HEADINGS = (
    "replicas",
    "tensor",
    "router",
    "output (tok/s)",
    "× one",
    "interval",
    "efficiency (%)",
    "communication (%)",
    "hit rate (%)",
    "kept (%)",
    "requests by replica",
    "placed at",
)
# Columns of tables in which a cell has them.
FURTHER = {
    "failures by replica": "liveness.parallel.failures",
    "hit rate by replica": "liveness.parallel.hit_rate",
    "KV handed over (bytes)": "liveness.parallel.kv_bytes_handed_over",
    "KV given (ms)": "liveness.parallel.kv_ms_given",
    "KV taken (ms)": "liveness.parallel.kv_ms_taken",
}


@dataclass(frozen=True)
class Scaled:
    """One cell beside the engine on one device that serves the same load."""

    cell: Cell
    alone: Cell | None  # that engine; None: the cell is that itself, or there is none
    speedup: Estimate | None
    hit_rate: float | None
    kept: float | None  # of that engine's hit rate

    @property
    def cells(self) -> list[Cell]:
        """Those of the speed-up."""
        return [self.cell] if self.alone is None else [self.cell, self.alone]

    @property
    def replicas(self) -> int:
        """Engines behind the queue."""
        return _degree(self.cell, "replicas")

    @property
    def tensor(self) -> int:
        """Devices of each engine."""
        return _degree(self.cell, "tensor")

    @property
    def devices(self) -> int:
        """Devices of all engines."""
        return _devices(self.cell)

    @property
    def router(self) -> str:
        """The policy; nothing to choose for one replica."""
        own = self.cell.first("config.engine.router")
        router = own or self.cell.first("config.parallel.router")
        return str(router) if self.replicas > 1 else MISSING

    @property
    def efficiency(self) -> float | None:
        """Speed of a device as a share of that of the one alone; None where replicas or ranks share
        cores, or nothing tells where they ran."""
        apart = self.cell.simulated or self.devices <= max(
            _num_places(str(self.cell.first("liveness.parallel.placed_at"))),
            int(number(self.cell.first("devices.count")) or 0),
        )
        return self.speedup.ratio / self.devices if self.speedup is not None and apart else None


@dataclass(frozen=True)
class ScaledLoad:
    """Cells that serve one load, the fewest devices first."""

    name: str  # what tells it from other loads; "" where there is one
    cells: tuple[Scaled, ...]

    @property
    def short(self) -> str:
        """Its workload, and knobs of it, where there is little room."""
        parts = (part.partition("=") for part in self.name.split())
        return " ".join(
            value if key == "workload" else f"{key.rpartition('.')[2]}={value}"
            for key, _, value in parts
            if key.partition(".")[0] not in ("arrival", "cache")
        )


class ScaleOutStudy(Study[list[ScaledLoad]]):
    """What each further device gives; it finds cells with several beside one with one."""

    name = "scale_out"
    leads = True
    title = "What does each further device give?"
    page_title = "What does each further device give with {model}?"
    file_names = ("scale_out.md",)

    def find(self, inputs: ReportInputs) -> list[ScaledLoad] | None:
        return scaled_loads(inputs.cells) or None

    def statements(self, result: list[ScaledLoad], inputs: ReportInputs) -> list[str]:
        return statements(result)

    def conclusion(self, result: list[ScaledLoad], inputs: ReportInputs) -> Conclusion:
        """The first statement, and what has to be known of the records."""
        headline, *others = statements(result, brief=True) or [self.title]
        return Conclusion(headline, [*others, *remarks(inputs.cells, inputs.knobs)])

    def picture(self, result: list[ScaledLoad], inputs: ReportInputs) -> Chart | None:
        """A row for each cell on several devices."""
        rows = [
            ForestRow(
                f"{load.short}: {_placed(one)}" if load.short else _placed(one),
                one.speedup.ratio,
                one.speedup.low,
                one.speedup.high,
                words=ratio(one.speedup.ratio),
            )
            for load in result
            for one in load.cells
            if one.speedup is not None
        ]
        label = "output tokens/s, one engine = 1"
        return forest(self.title, rows, label, "", even=1.0, span="95 % interval")

    def page_tables(self, result: list[ScaledLoad], inputs: ReportInputs) -> list[PageTable]:
        """A table a load."""
        return [PageTable(load.name or "Cells", headings(load), rows(load)) for load in result]


def _degree(cell: Cell, knob: str) -> int:
    if knob == "replicas" and (servers := number(cell.first("liveness.parallel.replicas"))):
        return int(servers)
    return int(number(cell.first(f"config.parallel.{knob}")) or 1)


def _num_places(placed_at: str) -> int:
    """How many cores or GPUs the places of a record name, such as "0,1 | 2,3" or
    "cuda:0,1 | cuda:2,3"; of servers nobody knows."""
    return 0 if "://" in placed_at else len({*re.findall(r"\d+", placed_at)})


def _hit_rate(cell: Cell) -> float | None:
    """Share of the prompt tokens that the prefix caches of all replicas had, or that servers count
    as cached."""
    for reused, of in ((REUSED, LOOKED_UP), (CACHED, COUNTED)):
        if looked_up := cell.mean(of):
            return (cell.mean(reused) or 0.0) / looked_up
    return None


def scaled_loads(cells: Sequence[Cell]) -> list[ScaledLoad]:
    """The loads that are served by one device and by several."""
    groups: dict[tuple[tuple[Any, bool], str], list[Cell]] = {}
    for cell in cells:
        if cell.ok:
            apart = {title for key, title in cell.columns.items() if key.startswith(APART)}
            known = {t: v for t, v in cell.varying.items() if t not in apart and v != MISSING}
            name = " ".join(f"{title}={value}" for title, value in known.items())
            load = cell.first("workload_hash"), cell.simulated
            groups.setdefault((load, name), []).append(cell)
    several = [
        (f"{name} {label}".strip(), alone, group)
        for (_, name), whole in groups.items()
        for label, alone, group in _beside_one(whole)
    ]
    return [
        _scaled_load(name if len(several) > 1 else "", alone, group)
        for name, alone, group in several
    ]


def _beside_one(cells: Sequence[Cell]) -> list[tuple[str, Cell | None, list[Cell]]]:
    """Cells on several devices by the cell on one that they are compared with, and what
    distinguishes it from others like it: one with as many blocks as all replicas, or else as many
    as each has."""
    alone = [cell for cell in cells if _devices(cell) == 1]
    several = [cell for cell in cells if _devices(cell) > 1]
    if not alone:
        return [("", None, several)] if len({*map(_devices, several)}) > 1 else []
    groups: dict[int, list[Cell]] = {}
    for cell in several:
        sizes = _num_blocks(cell) * _degree(cell, "replicas"), _num_blocks(cell)
        fitting = (one for size in sizes for one in alone if _num_blocks(one) == size)
        one = next(fitting, alone[0])
        groups.setdefault(alone.index(one), [one]).append(cell)
    names = [f"{BLOCKS}={alone[index].first(f'config.{BLOCKS}')}" for index in groups]
    return [
        (name if len(groups) > 1 else "", alone[index], group)
        for name, (index, group) in zip(names, groups.items(), strict=True)
    ]


def _devices(cell: Cell) -> int:
    return _degree(cell, "replicas") * _degree(cell, "tensor")


def _num_blocks(cell: Cell) -> int:
    """Blocks of each replica for requests, without the reserved one; 0 where they are not set."""
    return int(number(cell.first(f"config.{BLOCKS}")) or 1) - 1


def _scaled_load(name: str, alone: Cell | None, cells: Sequence[Cell]) -> ScaledLoad:
    best = None if alone is None else _hit_rate(alone)
    found = []
    for cell in cells:
        hit_rate = _hit_rate(cell)
        kept = hit_rate / best if hit_rate is not None and best and cell is not alone else None
        beside = None if cell is alone else alone
        found.append(Scaled(cell, beside, _speedup(beside, cell), hit_rate, kept))
    return ScaledLoad(name, tuple(sorted(found, key=lambda one: (one.devices, one.replicas))))


def _speedup(alone: Cell | None, cell: Cell) -> Estimate | None:
    """The ratio of output tokens a second."""
    if alone is None:
        return None
    return relative(cell, alone, lambda row: number(row.get(SPEED)))


def statements(result: Sequence[ScaledLoad], brief: bool = False) -> list[str]:
    """What devices gave for each load, and what the routers kept.

    Args:
        result: by load.
        brief: loads have their short names, where these tell them apart.
    """
    lines = []
    short = [load.short for load in result]
    for load in result:
        name = load.short if brief and short.count(load.short) == 1 else load.name
        begin = f"{name}: " if name else ""
        fastest = max(
            (one for one in load.cells if one.efficiency is not None),
            key=lambda one: one.speedup.ratio if one.speedup else 0.0,
            default=None,
        )
        if fastest is not None and fastest.speedup is not None:
            sure = interval(fastest.speedup.low, fastest.speedup.high)
            sure = f" ({sure})" if sure != MISSING else ""
            lines.append(
                f"{begin}{count(fastest.replicas, 'replica')} on "
                f"{count(fastest.devices, 'device')} gave {ratio(fastest.speedup.ratio)}{sure} the "
                "output tokens a second of one, "
                f"{sig(100 * (fastest.efficiency or 0.0))} % for each device"
                f"{caveat(*fastest.cells)}."
            )
        kept = [one for one in load.cells if one.kept is not None and one.replicas > 1]
        if kept:
            best = next((one.hit_rate for one in load.cells if one.devices == 1), None)
            counts = sorted({one.replicas for one in kept})
            words = [
                f"{one.router}{f' on {one.replicas}' * (len(counts) > 1)} "
                f"{sig(100 * (one.kept or 0.0))} %"
                for one in kept
            ]
            lines.append(
                f"{begin}{'of' if begin else 'Of'} one engine's hit rate of "
                f"{sig(100 * (best or 0.0))} %, {listing([*map(str, counts)])} replicas kept: "
                f"{listing(words)}."
            )
    return lines


def _placed(one: Scaled) -> str:
    """A cell among those of its load."""
    replicas = count(one.replicas, "replica")
    devices = f" on {count(one.devices, 'device')}" if one.tensor > 1 else ""
    return f"{replicas}{devices}{f', {one.router}' if one.router != MISSING else ''}"


def headings(load: ScaledLoad) -> list[str]:
    """HEADINGS, and those of FURTHER that a cell has something for."""
    return [*HEADINGS, *_further(load)]


def _further(load: ScaledLoad) -> dict[str, str]:
    has = [key for key in FURTHER.values() if any(one.cell.first(key) for one in load.cells)]
    return {heading: key for heading, key in FURTHER.items() if key in has}


def _figure(cell: Cell, key: str) -> str:
    value = cell.first(key)
    return str(value or MISSING) if value is None or isinstance(value, str) else sig(cell.mean(key))


def rows(load: ScaledLoad) -> list[list[str]]:
    """The cells under `headings`."""
    further = _further(load).values()

    def percent(share: float | None) -> str:
        return sig(None if share is None else 100 * share)

    return [
        [
            str(one.replicas),
            str(one.tensor),
            one.router,
            marked(sig(one.cell.mean(SPEED)), one.cell),
            marked(ratio(None if one.speedup is None else one.speedup.ratio), *one.cells),
            interval_text(one.speedup, *one.cells),
            percent(one.efficiency),
            percent(one.cell.mean("breakdown.collective_share")),
            percent(one.hit_rate),
            percent(one.kept),
            str(one.cell.first("liveness.parallel.requests") or MISSING),
            str(one.cell.first("liveness.parallel.placed_at") or MISSING),
            *(_figure(one.cell, key) for key in further),
        ]
        for one in load.cells
    ]
