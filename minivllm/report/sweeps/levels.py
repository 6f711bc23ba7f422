"""Which option for which load: the finding of a sweep of two knobs, at each level of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minivllm.analysis.ablation import factors
from minivllm.analysis.cell import Cell, Summary, like_for_like
from minivllm.analysis.cells import spoken
from minivllm.analysis.format import ratio
from minivllm.analysis.interleaving import busy_words, in_brackets
from minivllm.analysis.metric import MetricRef, find_metric
from minivllm.analysis.ranking import NAMES, rank
from minivllm.analysis.rows import number
from minivllm.report.ranking import Tie, tie_of

LOADS = ("config.arrival.", "config.workload.", "choices.arrival", "choices.workload")
BATCHING = ("choices.batching", "config.batching.")  # how many requests a step may have
# What a load is called in a sentence, by its knob.
WORDS = {
    "concurrency": "{} at once",
    "rate": "{} requests/s",
    "num_requests": "{} requests",
    "input_len": "prompts of {} tokens",
    "output_len": "answers of {} tokens",
}
MOST_TOLD = 5  # levels in a sentence


@dataclass(frozen=True)
class Level:
    """One value of the second knob.

    Args:
        name: of the value, in a sentence.
        value: of the knob; None where it is no number.
        ranked: the cells at it that have the figure, the best first, with their summaries.
        tie: with the second, where no order of the two is shown.
    """

    name: str
    value: float | None
    ranked: tuple[tuple[Cell, Summary], ...]
    tie: Tie | None

    @property
    def best(self) -> list[Cell]:
        """The first, and the second where the two are not separated."""
        second = [self.tie.second] if self.tie and self.tie.how == "not separated" else []
        return [self.ranked[0][0], *second]


@dataclass(frozen=True)
class Levels:
    """A sweep of an option over the levels of another knob.

    Args:
        option: title of the column of what is chosen.
        of: title of the column of the levels.
        is_load: whether the levels are loads.
        metric: what ranks the cells.
        levels: in order, each with at least two cells.
        options: all that there is to choose, in the order of the sweep.
    """

    option: str
    of: str
    is_load: bool
    metric: MetricRef
    levels: tuple[Level, ...]
    options: tuple[str, ...]

    @property
    def caveat(self) -> str:
        """How many blocks of the first two at each level were busy, as the end of a sentence."""
        cells = (cell for level in self.levels for cell, _ in level.ranked[:2])
        return in_brackets(busy_words(*cells))

    def at(self, where: str) -> str:
        """A level, or several, as part of a sentence."""
        return f"{'at' if self.is_load else 'with'} {where}"

    def condition(self, where: str) -> str:
        """The same as what may be so for a reader."""
        return f"your load is {where}" if self.is_load else f"{self.of} is {where}"

    def named(self, cell: Cell) -> str:
        """What is chosen with a cell."""
        return spoken(self.option, cell.varying[self.option])


def of_load(key: str) -> bool:
    """Whether a field of a record says what load there was."""
    return key.startswith(LOADS)


def load_words(title: str, value: str) -> str:
    """A level of a knob, in a sentence."""
    pattern = WORDS.get(title.rpartition(".")[2])
    return pattern.format(value) if pattern else spoken(title, value)


def levels_of(cells: Sequence[Cell]) -> Levels | None:
    """The levels of a sweep in which two knobs vary: those of its load; where none of the two is
    the load, those of its batching; and where none is that, their effects do not multiply, and the
    best option is not always the same, those of the second.

    Returns:
        None for any other sweep.
    """
    done = [cell for cell in cells if cell.configured and cell.timed]
    knobs = factors.knobs_of(list(cells)) if cells and len(cells[0].varying) > 1 else []
    if len(knobs) != 2 or not done:
        return None
    keys = {title: key for key, title in cells[0].columns.items()}
    loads = [title for title in knobs if of_load(keys[title])]
    batching = [title for title in knobs if keys[title].startswith(BATCHING)]
    chosen = loads or batching
    if len(chosen) == 2 or (not chosen and not factors.interact(cells)):
        return None
    of = chosen[0] if chosen else knobs[1]
    option = next(title for title in knobs if title != of)
    metric = find_metric(rank(done).metrics[0])
    groups: dict[str, list[Cell]] = {}
    for cell in done:
        groups.setdefault(cell.varying[of], []).append(cell)
    levels = [
        level for value, group in groups.items() if (level := _level(of, value, group, metric))
    ]
    if all(level.value is not None for level in levels):
        levels.sort(key=lambda level: level.value or 0.0)
    if len(levels) < 2:
        return None
    options = dict.fromkeys(spoken(option, cell.varying[option]) for cell in done)
    found = Levels(option, of, bool(loads), metric, tuple(levels), tuple(options))
    return found if chosen or len(runs(found)) > 1 else None


def _level(of: str, value: str, cells: Sequence[Cell], metric: MetricRef) -> Level | None:
    """A level at which at least two cells did the same work."""
    known = [
        (cell, stat) for cell in cells if (stat := cell.summary(metric.column)) and stat.mean > 0
    ]
    if len(known) < 2 or not all(like_for_like(known[0][0], cell) for cell, _ in known):
        return None
    ranked = sorted(known, key=lambda pair: -metric.better * pair[1].mean)
    key = next(key for key, title in cells[0].columns.items() if title == of)
    tie = tie_of(ranked, metric.column, "best")
    return Level(load_words(of, value), number(cells[0].first(key)), tuple(ranked), tie)


def sentence(found: Levels) -> str:
    """Which option for which level, as one sentence."""
    all_runs = runs(found)
    noun = "fastest" if found.metric.better > 0 else f"lowest in {NAMES[found.metric.name]}"
    if len(all_runs) == 1:
        (run,) = all_runs
        verb = "is" if len(run.options) == 1 else "are"
        what = "load" if found.is_load else found.of
        begin = f"{' and '.join(run.options)} {verb} the {noun} at every {what}"
        return f"{begin} ({run.ahead}){found.caveat}."
    parts = [f"{found.at(run.where)} {run.name} ({run.ahead})" for run in all_runs[:MOST_TOLD]]
    if len(all_runs) > MOST_TOLD:
        parts.append(f"and {len(all_runs) - MOST_TOLD} further changes of the best")
    return f"The {noun}: {', '.join(parts)}{found.caveat}."


@dataclass(frozen=True)
class LevelRun:
    """Neighbouring levels with the same answer: the best there, or those two that cannot be
    distinguished, and how far ahead it is."""

    options: tuple[str, ...]
    where: str
    ahead: str

    @property
    def name(self) -> str:
        return " or ".join(self.options)


def runs(found: Levels) -> list[LevelRun]:
    """The levels in order, neighbours with the same answer together."""
    groups: list[tuple[tuple[str, ...], list[Level]]] = []
    for level in found.levels:
        options = tuple(found.named(cell) for cell in level.best)
        if groups and groups[-1][0] == options:
            groups[-1][1].append(level)
        else:
            groups.append((options, [level]))
    return [
        LevelRun(
            options,
            " to ".join(dict.fromkeys((members[0].name, members[-1].name))),
            _margin(members, found),
        )
        for options, members in groups
    ]


def _margin(members: Sequence[Level], found: Levels) -> str:
    """How far the best is ahead of the next."""
    ties = [level.tie.how for level in members if level.tie is not None]
    if "not separated" in ties:
        return "not separated"
    leads = [level.ranked[0][1].mean / level.ranked[1][1].mean for level in members]
    ends = [ratio(lead**found.metric.better) for lead in sorted(leads)]
    seconds = {found.named(level.ranked[1][0]) for level in members}
    over = seconds.pop() if len(seconds) == 1 else "the next"
    apart = ", measured apart" if ties else ""
    return f"{' to '.join(dict.fromkeys((ends[0], ends[-1])))} {over}{apart}"
