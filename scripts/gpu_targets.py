"""What was aimed at on a GPU, beside what the records of scripts/gpu_suite.sh say, as a table in
Markdown.

    python scripts/gpu_targets.py                                    # of the records below runs/
    python scripts/gpu_targets.py --runs FOLDER --output targets.md

A figure is the median over an arm's blocks, and beside it stands the range from the lowest block to
the highest; of a ratio, from the lowest block over the other arm's highest to the reverse. Blocks
on both sides of the aim leave it undecided. Where several arms measure the same thing (with and
without overlapping steps, say) the best of them counts, and the last column names it. What has no
record, or none that can be read, is a row that says so. Every aim is a share of the limits that the
runs measured first, or a ratio of two arms, so that it is the same for any GPU. The table's head
names the GPU and these limits.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from program import exit_code, new_parser

from minivllm.analysis.cell import DEVICE, Cell
from minivllm.analysis.cells import gather
from minivllm.analysis.rows import Row, distinct, number, read_rows, record_folder
from minivllm.bench.records import storage
from minivllm.errors import BadInput
from minivllm.platform import files

MISSING = "not measured"
BATCH = 64  # requests in the decoding steps between which the device should not idle
FORMS = {"%": (100, 1, " %"), "×": (1, 2, "×")}  # factor, decimals, and what follows
MORE_DECIMALS = 4  # at most, where a figure would read like an aim that it is not

Value = Callable[[Row], float | None]


@dataclass(frozen=True)
class Runs:
    """The rows of the records, by sweep."""

    rows: Mapping[str, Sequence[Row]]
    unreadable: Mapping[str, int]  # how many records could not be read

    def on(self, device: str | None) -> Runs:
        """The rows of one device, and those without one, of workers that died early."""
        rows = {
            sweep: [row for row in rows if row.get(DEVICE) in (device, None)]
            for sweep, rows in self.rows.items()
        }
        return Runs(rows, self.unreadable)


@dataclass(frozen=True)
class Arms:
    """Arms that measure the same thing: those of some sweeps with these values of columns."""

    sweeps: tuple[str, ...]
    where: Mapping[str, object]

    def of(self, runs: Runs) -> dict[str, Cell]:
        """Each with its blocks, by a name for people; of one measured with several versions of the
        code the newest."""
        found: dict[str, Cell] = {}
        for sweep in self.sweeps:
            cells = gather(list(runs.rows.get(sweep, ())))
            cells.sort(key=lambda cell: cell.last_started)
            alone = len({cell.arm for cell in cells}) == 1  # its name is all of its overrides
            for cell in cells:
                if all(cell.first(key) == value for key, value in self.where.items()):
                    found[f"`{sweep}`" if alone else f"`{sweep}` {cell.arm}"] = cell
        return found


@dataclass(frozen=True)
class Figure:
    """A number of an arm, with the range over its blocks."""

    value: float
    low: float
    high: float
    blocks: int  # that each end of the range is one of
    source: str

    def over(self, other: Figure) -> Figure:
        """The ratio of both; whose blocks were which in time is not known, so the range takes every
        pair."""
        return Figure(
            self.value / other.value,
            self.low / other.high,
            self.high / other.low,
            min(self.blocks, other.blocks),
            f"{self.source}, over {other.source}",
        )


@dataclass(frozen=True)
class Target:
    """A target: a figure and its bound.

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
        """The figure in the records; None where some of them are missing."""
        first = self._best(self.arms, runs)
        if first is None or self.over is None:
            return first
        second = self._best(self.over, runs)
        return None if second is None or not second.low else first.over(second)

    def _values(self, cell: Cell) -> list[float]:
        return [value for row in cell.ok if (value := self.value(row)) is not None]

    def _best(self, arms: Arms, runs: Runs) -> Figure | None:
        found = []
        for name, cell in arms.of(runs).items():
            if values := self._values(cell):
                source = f"{name} ({len(values)}/{cell.tried} blocks)"
                found.append(Figure(median(values), min(values), max(values), len(values), source))
        return (min if self.most else max)(found, key=lambda figure: figure.value, default=None)

    def row(self, runs: Runs) -> str:
        """The row of this target in the table."""
        figure = self.figure(runs)
        value, span, verdict, sources = MISSING, "–", "–", self._missing(runs)
        if figure is not None:
            value, span = self._shown(figure.value), self._range(figure)
            verdict, sources = self._verdict(figure), [figure.source]
        aimed = f"at {'most' if self.most else 'least'} {self._shown(self.aim)}"
        records = "; ".join(sources + self._unreadable(runs))
        return f"| {self.what} | {value} | {span} | {aimed} | {verdict} | {records} |"

    def _shown(self, value: float) -> str:
        """The value in the target's unit, with enough decimals to differ from the target."""
        factor, decimals, unit = FORMS[self.unit]
        forms = [f",.{decimals + more}f" for more in range(MORE_DECIMALS + 1)]
        apart = (
            form for form in forms if f"{factor * value:{form}}" != f"{factor * self.aim:{form}}"
        )
        return f"{factor * value:{next(apart, forms[0])}}{unit}"

    def _range(self, figure: Figure) -> str:
        """The range from the lowest block to the highest."""
        if figure.blocks < 2:
            return "–"
        return f"{self._shown(figure.low)} to {self._shown(figure.high)}"

    def _verdict(self, figure: Figure) -> str:
        """The verdict on the target: met or missed by all blocks, or undecided."""
        ends = (figure.low, figure.high)
        met = [end <= self.aim if self.most else end >= self.aim for end in ends]
        verdict = "met" if all(met) else "undecided" if any(met) else "missed"
        return verdict if figure.blocks > 1 else f"{verdict}, by one block"

    def _missing(self, runs: Runs) -> list[str]:
        """The sweeps of a missing figure, with the statuses of their arms."""
        found: dict[str, str] = {}
        for arms in self.compared():
            statuses = {
                name: cell.status_text
                + ", without this figure" * bool(cell.ok and not self._values(cell))
                for name, cell in arms.of(runs).items()
            }
            none = {
                f"`{sweep}`": "no record" for sweep in arms.sweeps if not runs.unreadable.get(sweep)
            }
            found |= statuses or none
        return [f"{name}: {status}" for name, status in found.items()]

    def _unreadable(self, runs: Runs) -> list[str]:
        """The unreadable records of each sweep."""
        counts = {sweep: runs.unreadable.get(sweep, 0) for sweep in self.sweeps()}
        return [f"`{sweep}`: {count} not readable" for sweep, count in counts.items() if count]

    def sweeps(self) -> list[str]:
        """The sweeps with records of this target, each once."""
        return list(dict.fromkeys(sweep for arms in self.compared() for sweep in arms.sweeps))

    def compared(self) -> list[Arms]:
        """All arms of this target."""
        return [arms for arms in (self.arms, self.over) if arms is not None]


def column(name: str) -> Value:
    """A figure that is a field of the record."""
    return lambda row: number(row.get(name))


def tokens_per_s(row: Row) -> float | None:
    """The decoding rate of one request, from its first token on."""
    tpot_ms = number(row.get("metrics.tpot_ms.p50"))
    return 1000 / tpot_ms if tpot_ms else None


def prompts_per_s(row: Row) -> float | None:
    """The rate of prompts that are computed one after another."""
    ttft_ms = number(row.get("metrics.ttft_ms.p50"))
    return 1000 / ttft_ms if ttft_ms else None


def gap(row: Row) -> float | None:
    """The share of decoding steps of BATCH requests from the last kernel of one to the first of the
    next."""
    folder = record_folder(row)
    if folder is None:
        return None
    try:
        decoding = json.loads((folder / storage.IDLE).read_text(encoding="utf-8"))["decoding"]
        return number(decoding["between"]) if decoding and decoding["requests"] == BATCH else None
    except (OSError, ValueError, KeyError, TypeError):  # there is none, or it is of other code
        return None


MODEL, QUANT, BATCHING, ENGINE = (
    f"choices.{group}" for group in ("model", "quant", "batching", "engine")
)
AT_ONCE = "config.arrival.concurrency"
LARGE, SMALL = {MODEL: "qwen3_8b"}, {MODEL: "qwen3"}
ALONE = ("gpu-batch1", "gpu-batch1-triton", "gpu-first-batch1")


def _bandwidth(name: str, model: Mapping[str, object], aim: float) -> Target:
    """The share of the measured bandwidth that decoding of one request reaches."""
    what = f"{name}, one request: bandwidth used (MBU)"
    arms = Arms(ALONE, {**model, QUANT: "bf16"})
    return Target(what, aim, "%", column("roofline.mbu"), arms)


def _quantised(quant: str, requests: int) -> Arms:
    sweeps = ("gpu-8b-precision", "gpu-first-batch1")
    return Arms(sweeps, {**LARGE, QUANT: quant, AT_ONCE: requests})


def _narrower(quant: str, name: str, requests: int, aim: float) -> Target:
    """The decoding speed of a format over that of 16 bits."""
    what = f"Qwen3-8B, {requests} at once: {name} over bf16, decoding"
    return Target(
        what, aim, "×", tokens_per_s, _quantised(quant, requests), _quantised("bf16", requests)
    )


def _prompt(**choices: str) -> Arms:
    columns = {f"choices.{group}": choice for group, choice in choices.items()}
    return Arms(("gpu-8b-prompt-activations",), {**LARGE, **columns})


def _continuous(sweep: str, lengths: str, aim: float) -> Target:
    """What continuous batching is worth."""
    what = f"Qwen3-8B, 64 at once, {lengths}: continuous over static batching"
    continuous, static = (
        Arms((sweep,), {**LARGE, BATCHING: kind}) for kind in ("continuous", "static")
    )
    return Target(what, aim, "×", column("metrics.steady.output_tokens_per_s"), continuous, static)


def _many(engine: str) -> Arms:
    return Arms(("gpu-256-requests", "gpu-many"), {**SMALL, ENGINE: engine})


def _gap(name: str, model: Mapping[str, object]) -> Target:
    """The time that the device waits for the host, under a profiler, which prolongs it."""
    what = (
        f"{name}, {BATCH} at once: gap between decoding steps, of the step (traced: an upper bound)"
    )
    return Target(what, 0.02, "%", gap, Arms(("gpu-gap",), model), most=True)


TARGETS = (
    _bandwidth("Qwen3-8B", LARGE, 0.85),
    # Steps of a small model are mostly launches: vLLM and SGLang reach at most so much at 1B on an
    # H100, a persistent kernel 78 %.
    _bandwidth("Qwen3-0.6B", SMALL, 0.5),
    Target(
        "Qwen3-0.6B, 256 requests: share of the run that the limits allow",
        0.75,
        "%",
        column("roofline.share"),
        _many("minivllm"),
    ),
    # It turns the other two off itself where attention takes a mask, and only flash-attn's kernels
    # take none.
    Target(
        "Qwen3-0.6B, 256 requests: output tokens/s over transformers' continuous batching "
        "(sdpa, without CUDA graphs, not asynchronous)",
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
    Target(
        "Qwen3-8B, a prompt of 8,192 tokens: int8 with 8-bit activations over bf16",
        1.2,
        "×",
        prompts_per_s,
        _prompt(quant="int8"),
        _prompt(quant="bf16"),
    ),
    _narrower("nf4", "NF4", 1, 2.5),
    _narrower("nf4", "NF4", 16, 1.2),
    _narrower("int8", "int8", 1, 1.45),
    _continuous("gpu-8b-batching", "lengths of 100 to 1,024", 1.4),
    _continuous("gpu-8b-batching-azure", "lengths of Azure's conversations", 2),
    _gap("Qwen3-8B", LARGE),
    _gap("Qwen3-0.6B", SMALL),
)


def read(root: Path) -> Runs:
    """The records of all sweeps with targets."""
    rows: dict[str, list[Row]] = {}
    unreadable: dict[str, int] = {}
    for sweep in dict.fromkeys(sweep for target in TARGETS for sweep in target.sweeps()):
        files = list((root / sweep).glob(f"*/{storage.RECORD}"))
        if files:
            try:
                rows[sweep], left_out = read_rows(root / sweep)
            except BadInput:  # none of them can be read
                left_out = [str(file) for file in files]
            unreadable[sweep] = len(left_out)
    return Runs(rows, unreadable)


def limits(runs: Runs) -> str:
    """The limits that the runs measured, in a sentence: medians."""
    rates: dict[str, list[float]] = {}
    for row in (row for rows in runs.rows.values() for row in rows):
        dtype = row.get("roofline.matrix_dtype")
        for name, key in (
            ("reading at {:.2f} TB/s", "roofline.bandwidth_bytes_per_s"),
            (f"products of {dtype} at {{:.0f}} TFLOP/s", "roofline.matrix_flops_per_s"),
        ):
            if rate := number(row.get(key)):
                rates.setdefault(name, []).append(rate / 1e12)
    found = [name.format(median(values)) for name, values in sorted(rates.items())]
    return f"Measured limits: {', '.join(found)}." if found else "No record has measured limits."


def table(runs: Runs, device: str | None) -> str:
    """The targets on one device, in Markdown; None is a device that no record names."""
    own = runs.on(device)
    lines = [
        f"# Targets on {device or 'a device that no record names'}",
        "",
        limits(own),
        "",
        "| target | figure | lowest to highest block | aimed at | | records |",
        "| :-- | --: | --: | --: | :-- | :-- |",
    ]
    return "\n".join([*lines, *(target.row(own) for target in TARGETS)]) + "\n"


def main() -> int:
    """Entry point; see the module's docstring. Returns the exit code."""
    parser = new_parser(__doc__, default=None)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="the folder of the sweeps")
    arguments = parser.parse_args()
    runs = read(arguments.runs)
    devices = distinct((row for rows in runs.rows.values() for row in rows), DEVICE)
    text = "\n".join(table(runs, device) for device in devices or [None])
    print(text, end="")
    if arguments.output is not None:
        try:
            files.write_text(arguments.output, text)
        except OSError as error:
            print(f"{arguments.output} cannot be written: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
