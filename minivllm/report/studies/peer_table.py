"""How fast is each engine beside the others: a row a question (batch, prefill, load, memory, cost),
a column an engine, and how far minivllm is ahead of the best other one, by default and with 8-bit
activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from minivllm.analysis.cell import Cell
from minivllm.analysis.format import MISSING, listing, ratio, show, sig
from minivllm.analysis.interleaving import apart, log_ratios, marked, relative
from minivllm.analysis.rows import Row, distinct, number

BITS = {"fp32": "fp32", "fp8": "8 bits", "int8": "8 bits", "int8_mixed": "8 bits"}
BITS |= {"nf4": "4 bits", "int4": "4 bits"}
FLOATS = "16 bits"
UNKNOWN = "not known"  # a server's own
FEWEST = 4  # blocks that an interval takes
OURS, PACKED = "minivllm", ("int8",)  # values of quant.activations with a column of their own
ORDER = ("fp32", FLOATS, "8 bits", "4 bits", UNKNOWN)
TO_BEST = "to the best"
DEFAULT = "default (weights only)"  # our column beside that with 8-bit activations
ENGINE, QUANT, CONCURRENT = "choices.engine", "choices.quant", "config.arrival.concurrency"
PROMPT = "config.workload.input_len"


@dataclass(frozen=True)
class Question:
    """A row of the table.

    Args:
        text: of the question.
        figure: of one record; None where it has none.
        lower: whether less is better.
        speed: the load, where it asks for output tokens a second; "" for anything else.
    """

    text: str
    figure: Callable[[Row], float | None]
    lower: bool = False
    speed: str = ""


@dataclass(frozen=True)
class EngineFigure:
    """One engine's answer: of its best cell."""

    text: str
    mean: float | None = None
    cell: Cell | None = None


@dataclass(frozen=True)
class Ahead:
    """By what factor a column of ours is better than the best other engine.

    `low` and `high` are ends of the interval of pairs of the same block, or where these are too few
    for one, the least and the greatest; None without several. `text` has brackets for these.
    """

    ratio: float
    text: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class PeerLine:
    """A row of the table with its answers, in the order of the engines.

    `aheads` are of each column of ours that has an answer, by its name.
    """

    bits: str
    question: Question
    answers: tuple[EngineFigure, ...]
    aheads: dict[str, Ahead]
    named: bool  # whether there are several columns of ours

    @property
    def ahead(self) -> str:
        """The factors, each with the name of its column where there is more than the default's."""
        if not self.named or self.aheads.keys() == {DEFAULT}:
            return next((one.text for one in self.aheads.values()), MISSING)
        return "; ".join(f"{name} {one.text}" for name, one in self.aheads.items()) or MISSING


@dataclass(frozen=True)
class PeersTable:
    """The table, and what its figures stand on."""

    engines: tuple[str, ...]
    lines: tuple[PeerLine, ...]
    settings: tuple[tuple[str, ...], ...]  # see SETTINGS
    notes: tuple[str, ...]


SETTINGS = ("engine", "quant", "activations", "KV cache", "version", "threads")


def decode(row: Row) -> float | None:
    """Tokens a second of a request while it decodes."""
    gap = number(row.get("metrics.itl_ms.mean"))
    return 1e3 / gap if gap else None


def prefill(row: Row) -> float | None:
    """Prompt tokens a second until the first token of a request that is alone."""
    ttft, requests = (number(row.get(f"metrics.{k}")) for k in ("ttft_ms.mean", "num_requests"))
    given = number(row.get("metrics.input_tokens"))
    return given / requests / ttft * 1e3 if ttft and requests and given else None


def of(key: str, scale: float = 1.0) -> Callable[[Row], float | None]:
    """A field of the record, scaled."""

    def figure(row: Row) -> float | None:
        value = number(row.get(key))
        return None if value is None else value * scale

    return figure


ALONE = (
    Question("1 at once, decode (tok/s)", decode, speed="1 at once"),
    Question("prefill (tok/s)", prefill),
    Question("load (s)", of("cold.load_s"), lower=True),
    Question("peak memory, 1 at once (GB)", of("memory.host_rss_peak", 1e-9), lower=True),
)
SPEED = of("metrics.output_tokens_per_s")
COST = "cost.per_million_output_tokens"


def engine_of(cell: Cell) -> str:
    """The column of a cell: its engine; minivllm with 8-bit activations has one of its own."""
    engine = str(cell.first(ENGINE))
    activations = cell.first("config.quant.activations")
    return (
        f"{engine}, {activations} activations"
        if engine == OURS and activations in PACKED
        else engine
    )


def bits_of(cell: Cell) -> str:
    """The width of the weights."""
    quant = cell.first(QUANT)
    return UNKNOWN if quant is None else BITS.get(str(quant), FLOATS)


def compare(cells: Sequence[Cell]) -> PeersTable | None:
    """The table; None unless minivllm and another engine were measured in a closed loop, and what
    was requested of them varies."""
    closed = [cell for cell in cells if cell.first(CONCURRENT) and not cell.simulated]
    names = dict.fromkeys(map(engine_of, closed))
    engines = tuple(sorted(names, key=lambda name: (not _ours(name), name != OURS and _ours(name))))
    others = [name for name in engines if not _ours(name)]
    requested = {(bits_of(cell), *_load(cell)) for cell in closed}
    if not others or len(others) == len(engines) or len(requested) < 2:
        return None
    lines = []
    for bits in ORDER:
        among = [cell for cell in closed if bits_of(cell) == bits]
        if not any(cell.ok for cell in among):
            continue
        loads = sorted(set(map(_load, among)))
        for load in loads:
            batch, prompt = load
            several = sum(batch == other for other, _ in loads) > 1
            same = [cell for cell in among if _load(cell) == load]
            for question in _questions(batch, same, prompt if several else None):
                lines.append(_line(bits, question, engines, same))
    return PeersTable(engines, tuple(lines), _settings(closed), tuple(_notes(closed)))


def _load(cell: Cell) -> tuple[int, int]:
    """Requests at once, and the length of every prompt; 0 where lengths are drawn."""
    return int(cell.first(CONCURRENT)), int(number(cell.first(PROMPT)) or 0)


def _ours(engine: str) -> bool:
    return engine.partition(",")[0] == OURS


def _questions(batch: int, cells: Sequence[Cell], prompt: int | None) -> Iterable[Question]:
    """The questions about a load; `prompt` is the length of prompts where a batch has several."""
    words = "" if prompt is None else f", prompt of {prompt:,}"
    load = f"{batch} at once"
    questions = list(ALONE) if batch == 1 else [Question(f"{load} (tok/s)", SPEED, speed=load)]
    if any(cell.mean(COST) is not None for cell in cells):
        currency = show(next(filter(None, (cell.first("cost.currency") for cell in cells)), ""))
        text = f"{batch} at once, cost ({currency} per million tokens)"
        questions.append(Question(text, of(COST), lower=True))
    return [
        replace(one, text=one.text + words, speed=one.speed and one.speed + words)
        for one in questions
    ]


def _line(bits: str, question: Question, engines: Sequence[str], cells: Sequence[Cell]) -> PeerLine:
    answers = tuple(
        _answer(question, [cell for cell in cells if engine_of(cell) == name]) for name in engines
    )
    known = dict(zip(engines, answers, strict=True))
    theirs = _best(question, [one for name, one in known.items() if not _ours(name)])
    aheads = {
        _column(name): ahead
        for name, one in known.items()
        if _ours(name) and (ahead := _ahead(question, one, theirs)) is not None
    }
    return PeerLine(bits, question, answers, aheads, sum(map(_ours, engines)) > 1)


def _column(engine: str) -> str:
    """A column of ours, beside another one."""
    return engine.partition(", ")[2] or DEFAULT


def _answer(question: Question, cells: Sequence[Cell]) -> EngineFigure:
    """The best of an engine's cells."""
    if not cells:
        return EngineFigure(MISSING)
    answers = []
    for cell in cells:
        known = [value for row in cell.timed if (value := question.figure(row)) is not None]
        if known:
            mean = math.fsum(known) / len(known)
            answers.append(EngineFigure(marked(sig(mean), cell), mean, cell))
    found = _best(question, answers)
    failed = [cell.status_text for cell in cells if not cell.ok]
    return found or EngineFigure(failed[0] if failed else MISSING)


def _best(question: Question, answers: Sequence[EngineFigure]) -> EngineFigure | None:
    known = [answer for answer in answers if answer.mean is not None]
    sign = -1 if question.lower else 1
    return max(known, key=lambda answer: sign * (answer.mean or 0.0), default=None)


def _ahead(question: Question, ours: EngineFigure, theirs: EngineFigure | None) -> Ahead | None:
    """By what factor our figure is better: with the interval of blocks in turns, or where these
    are too few for one, the least and the greatest in brackets; None where either has none."""
    if theirs is None or ours.cell is None or theirs.cell is None:
        return None
    cells = (theirs.cell, ours.cell) if question.lower else (ours.cell, theirs.cell)
    found, logs = relative(*cells, question.figure), log_ratios(*cells, question.figure)
    if found is None:
        return None
    text, low, high = ratio(found.ratio), found.low, found.high
    if low is not None and high is not None:
        text += f" ({sig(low)} to {sig(high)})"
    elif len(logs) > 1:
        low, high = math.exp(min(logs)), math.exp(max(logs))
        text += f" [{sig(low)}, {sig(high)}]"
    text = marked(f"{text}, apart" if apart(*cells) else text, *cells)
    return Ahead(found.ratio, text, low, high)


def _settings(cells: Sequence[Cell]) -> tuple[tuple[str, ...], ...]:
    """What each engine was set to, or settled on."""
    rows: dict[tuple[str, ...], None] = {}
    for cell in cells:
        if not cell.ok:
            continue
        engine = str(cell.first(ENGINE))
        activations = cell.first("liveness.quant.activations") or cell.first(
            "config.quant.activations"
        )
        version = cell.first("liveness.engine.version")
        rows[
            engine,
            cell.named(QUANT),
            show(activations or "none"),
            show(cell.first("liveness.cache.kv_dtype") or cell.named("config.cache.kv_dtype")),
            show(version) if version is not None else MISSING,
            show(cell.first("provenance.threads")),
        ] = None
    return tuple(rows)


def _notes(cells: Sequence[Cell]) -> Iterable[str]:
    absent = [engine_of(cell) for cell in cells if cell.absent]
    if absent:
        yield f"Not installed, so not measured: {listing([*dict.fromkeys(absent)], 8)}."
    eight = [
        f"{cell.first(ENGINE)} ({cell.first(QUANT)})"
        for cell in cells
        if cell.first("liveness.quant.activations") not in (None, "none")
    ]
    if eight:
        yield f"Activations of 8 bits were multiplied by {listing([*dict.fromkeys(eight)], 8)}."
    done = [row for cell in cells for row in cell.ok]
    if done and not any(number(row.get("energy.joules")) for row in done):
        reasons = [show(value) for value in distinct(done, "energy.reason")]
        yield f"Energy is unknown: {listing(reasons) or 'no reason was recorded'}."
    known = [cell for cell in cells if cell.ok]
    if known and min(len(cell.timed) for cell in known) < FEWEST:
        yield (
            f"Some cells have fewer than {FEWEST} blocks: in brackets are the least and greatest "
            "ratio of a block, which is no interval."
        )
    if any(apart(cell, other) for cell, other in combinations(known, 2)):
        yield (
            "apart: the two cells did not take turns, so that what changed on the machine in "
            "between is in their ratio, and there is no interval (measure.isolation=run takes "
            "turns)."
        )
    if any(cell.busy for cell in known):
        yield "busy: other processes used the machine meanwhile; figures may be worse for it."
