"""What was aimed at on a GPU, beside what the records of scripts/gpu_suite.sh say, as a table in Markdown.

    python scripts/gpu_targets.py                                    # of the records below runs/
    python scripts/gpu_targets.py --runs FOLDER --output targets.md

A figure is the median over an arm's blocks. Where several arms measure the same thing (with and without overlapping steps,
say) the best of them counts, and the last column names it. What has no record is a row that says so. The aims are
for one NVIDIA H200; on another GPU the figures are the same, and the table's head names it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from minivllm.bench import storage
from minivllm.report.cells import DEVICE, Cell, gather
from minivllm.report.rows import Row, distinct, number, read_rows, record_folder

AIMED_FOR = "NVIDIA H200"
MISSING = "not measured"
BATCH = 64  # requests whose decoding steps the device should not idle between
FORMS: dict[str, Callable[[float], str]] = {
    "%": lambda value: f"{100 * value:.1f} %",
    "×": lambda value: f"{value:.2f}×",
    "tokens/s": lambda value: f"{value:,.0f} tokens/s",
}

Runs = Mapping[str, Sequence[Row]]  # the records of one device, by sweep
Value = Callable[[Row], float | None]


@dataclass(frozen=True)
class Arms:
    """Arms that measure the same thing: those of some sweeps whose records have these columns."""

    sweeps: tuple[str, ...]
    where: Mapping[str, object]

    def of(self, runs: Runs) -> dict[str, Cell]:
        """Each with its blocks, by a name for people; of one measured with several versions of the code the newest."""
        found: dict[str, Cell] = {}
        for sweep in self.sweeps:
            cells = gather(list(runs.get(sweep, ())))
            cells.sort(key=lambda cell: cell.last_started)
            alone = len({cell.arm for cell in cells}) == 1  # its name is all of its overrides
            for cell in cells:
                if all(cell.first(key) == value for key, value in self.where.items()):
                    found[f"`{sweep}`" if alone else f"`{sweep}` {cell.arm}"] = cell
        return found


@dataclass(frozen=True)
class Figure:
    """A number, and which arm it is of."""

    value: float
    source: str


@dataclass(frozen=True)
class Target:
    """A figure that was aimed at.

    Args:
        what: it is.
        aim: at least so much.
        unit: one of FORMS; "%" is of a share.
        value: of one record; None where it does not say.
        arms: whose records.
        over: the figure is divided by that of these; None where it is none of two.
        most: the aim is the most that it may be.
    """

    what: str
    aim: float
    unit: str
    value: Value
    arms: Arms
    over: Arms | None = None
    most: bool = False

    def figure(self, runs: Runs) -> Figure | None:
        """What the records say; None where some of them are missing."""
        first = self._best(self.arms, runs)
        if first is None or self.over is None:
            return first
        second = self._best(self.over, runs)
        if second is None or not second.value:
            return None
        return Figure(first.value / second.value, f"{first.source}, over {second.source}")

    def _best(self, arms: Arms, runs: Runs) -> Figure | None:
        found = []
        for name, cell in arms.of(runs).items():
            values = [value for row in cell.ok if (value := self.value(row)) is not None]
            if values:
                found.append(Figure(median(values), f"{name} ({len(values)}/{cell.tried} blocks)"))
        return (min if self.most else max)(found, key=lambda figure: figure.value, default=None)

    def row(self, runs: Runs) -> str:
        """A line of the table."""
        figure = self.figure(runs)
        aimed = f"at {'most' if self.most else 'least'} {FORMS[self.unit](self.aim)}"
        if figure is None:
            return f"| {self.what} | {MISSING} | {aimed} | – | {self._missing(runs)} |"
        met = figure.value <= self.aim if self.most else figure.value >= self.aim
        verdict = "met" if met else "missed"
        return f"| {self.what} | {FORMS[self.unit](figure.value)} | {aimed} | {verdict} | {figure.source} |"

    def _missing(self, runs: Runs) -> str:
        """The sweeps that would tell, and what became of their arms."""
        found: dict[str, str] = {}
        for arms in (self.arms, self.over):
            if arms is not None:
                told = {name: cell.status_text for name, cell in arms.of(runs).items()}
                found |= told or {f"`{sweep}`": "no record" for sweep in arms.sweeps}
        return "; ".join(f"{name}: {status}" for name, status in found.items())


def column(name: str) -> Value:
    """A number that is in the record itself."""
    return lambda row: number(row.get(name))


def tokens_per_s(row: Row) -> float | None:
    """Of one request, from its first token on."""
    tpot_ms = number(row.get("metrics.tpot_ms.p50"))
    return 1000 / tpot_ms if tpot_ms else None


def idle(row: Row) -> float | None:
    """The share of the time between decoding steps of BATCH requests in which the device was idle."""
    folder = record_folder(row)
    if folder is None or not (folder / storage.IDLE).exists():
        return None
    decoding = json.loads((folder / storage.IDLE).read_text(encoding="utf-8"))["decoding"]
    return number(decoding["share"]) if decoding and decoding["requests"] == BATCH else None


MODEL, QUANT, BATCHING, ENGINE = (f"choices.{group}" for group in ("model", "quant", "batching", "engine"))
AT_ONCE = "config.arrival.concurrency"
LARGE, SMALL = {MODEL: "qwen3_8b"}, {MODEL: "qwen3"}
ALONE = ("gpu-batch1", "gpu-batch1-triton")


def _quantised(quant: str, requests: int) -> Arms:
    return Arms(("gpu-8b-precision",), {**LARGE, QUANT: quant, AT_ONCE: requests})


def _narrower(quant: str, name: str, requests: int, aim: float) -> Target:
    """How much faster a format decodes than 16 bits."""
    what = f"Qwen3-8B, {requests} at once: {name} over bf16, decoding"
    return Target(what, aim, "×", tokens_per_s, _quantised(quant, requests), _quantised("bf16", requests))


def _continuous(sweep: str, lengths: str, aim: float) -> Target:
    """What continuous batching is worth."""
    what = f"Qwen3-8B, 64 at once, {lengths}: continuous over static batching"
    continuous, static = (Arms((sweep,), {**LARGE, BATCHING: kind}) for kind in ("continuous", "static"))
    return Target(what, aim, "×", column("metrics.steady.output_tokens_per_s"), continuous, static)


def _many(engine: str) -> Arms:
    return Arms(("gpu-256-requests",), {**SMALL, ENGINE: engine})


def _idle(name: str, model: Mapping[str, object]) -> Target:
    """How long the device waits for the host."""
    what = f"{name}, {BATCH} at once: the device idles between decoding steps"
    return Target(what, 0.02, "%", idle, Arms(("gpu-gap",), model), most=True)


TARGETS = (
    Target(
        "Qwen3-8B, one request: bandwidth used (MBU)", 0.8, "%", column("roofline.mbu"), Arms(ALONE, LARGE)
    ),
    Target("Qwen3-0.6B, one request: decoding", 900, "tokens/s", tokens_per_s, Arms(ALONE, SMALL)),
    Target(
        "Qwen3-0.6B, 256 requests: share of the run that the limits allow",
        0.7,
        "%",
        column("roofline.share"),
        _many("minivllm"),
    ),
    Target(
        "Qwen3-0.6B, 256 requests: output tokens/s over transformers' continuous batching",
        3,
        "×",
        column("metrics.output_tokens_per_s"),
        _many("minivllm"),
        _many("transformers_continuous"),
    ),
    Target(
        "Qwen3-8B, a prompt of 8,192 tokens: matrix rate used (MFU)",
        0.55,
        "%",
        column("roofline.mfu"),
        Arms(("gpu-8b-prompt",), LARGE),
    ),
    _narrower("nf4", "NF4", 1, 1.8),
    _narrower("nf4", "NF4", 16, 1.2),
    _narrower("int8", "int8", 1, 1.45),
    _continuous("gpu-8b-batching", "lengths of 100 to 1,024", 1.4),
    _continuous("gpu-8b-batching-azure", "lengths of Azure's conversations", 2),
    _idle("Qwen3-8B", LARGE),
    _idle("Qwen3-0.6B", SMALL),
)


def read(root: Path) -> dict[str, list[Row]]:
    """The records of the sweeps that targets are about, by sweep, as far as there are any."""
    arms = [arms for target in TARGETS for arms in (target.arms, target.over) if arms is not None]
    folders = {sweep: root / sweep for one in arms for sweep in one.sweeps}
    return {
        sweep: read_rows(folder)[0]
        for sweep, folder in folders.items()
        if any(folder.glob(f"*/{storage.RECORD}"))
    }


def table(runs: Runs, device: str | None) -> str:
    """The targets on one device, in Markdown; None is a device that no record names."""
    lines = [
        f"# Targets on {device or 'a device that no record names'}",
        "",
        f"Aimed at on one {AIMED_FOR}.",
        "",
        "| target | figure | aimed at | | records |",
        "| :-- | --: | --: | :-- | :-- |",
    ]
    # A worker that died early could not say where it ran.
    own = {sweep: [row for row in rows if row.get(DEVICE) in (device, None)] for sweep, rows in runs.items()}
    return "\n".join([*lines, *(target.row(own) for target in TARGETS)]) + "\n"


def main() -> None:
    """Entry point; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="the folder of the sweeps")
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    runs = read(arguments.runs)
    devices = distinct((row for rows in runs.values() for row in rows), DEVICE)
    text = "\n".join(table(runs, device) for device in devices or [None])
    print(text, end="")
    if arguments.output is not None:
        storage.write_text(arguments.output, text)


if __name__ == "__main__":
    main()
