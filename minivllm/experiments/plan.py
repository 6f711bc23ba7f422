"""The arms of a sweep, each a name and a list of overrides."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.types import Override

from minivllm.analysis.ablation.design import Design
from minivllm.analysis.metric import USUAL
from minivllm.bench.records.identity import NEUTRAL_MEASURE, digest
from minivllm.bench.records.measurement import DEFAULT_ARM
from minivllm.config.overrides import hidden
from minivllm.errors import BadInput

SETTINGS = "sweep."  # prefix of overrides that are settings of the sweep, not of its cells
MAX_ARMS = 10_000  # composing an arm takes 0.05 s
NEUTRAL = (
    "name",
    "runs_dir",
    "reports_dir",
    "ablation.max_arms",
)  # knobs that are not part of a sweep's definition

# Groups and knobs that a command has once, for all of its arms.
OF_SWEEP = (
    *("hydra", "sweep", "ablation", "optimisations", "name", "runs_dir", "reports_dir"),
    *("report", "tracker", "view"),
)
OF_SWEEP_MEASURE = tuple(
    f"measure.{name}" for name in ("repeats", "target_ci", "max_repeats", "isolation")
)


@dataclass(frozen=True)
class Arm:
    """One cell of a sweep: a name and all of its overrides."""

    name: str
    overrides: tuple[str, ...]
    on: tuple[str, ...] = ()  # the optimisations that an ablation turns on


@dataclass(frozen=True)
class Sweep:
    """The sweep of a command: its arms and its settings."""

    arms: tuple[Arm, ...]
    settings: tuple[str, ...]  # overrides of the `sweep` node, common to all arms
    blocks: Blocks | None = None  # of an ablation

    def definition(self) -> list[list[str]]:
        """The overrides of every arm, in sorted order."""
        return sorted(essential(arm.overrides) for arm in self.arms)

    def hash(self) -> str:
        """A hash of the definition, so that the same command finds its records again."""
        return digest(self.definition())


def essential(overrides: Iterable[str]) -> list[str]:
    """The overrides that change what is measured, without secrets, in sorted order."""
    return sorted(hidden(text) for text in overrides if not _neutral(text))


def _neutral(override: str) -> bool:
    """Whether an override changes where or how results are written, but not what is measured."""
    key = override.partition("=")[0].lstrip("+~")
    if key in ("measure.quality", "measure.events"):  # change no cell, but add to a record
        return False
    group, _, knob = key.partition(".")
    return (
        key in NEUTRAL
        or group in ("report", "tracker", "view")
        or (group == "measure" and knob.split(".")[0] in NEUTRAL_MEASURE)
    )


def is_setting(override: str) -> bool:
    """Whether an override is a setting of the sweep, not of its cells."""
    return override.lstrip("+~").startswith(SETTINGS)


def require_own(
    texts: Iterable[str], where: str, remedy: str = "give it on the command line"
) -> None:
    """Raise BadInput for an override that an arm cannot have of its own, since it is a setting of
    the whole sweep.

    Args:
        texts: overrides of some arms.
        where: where they are written, which begins the message.
        remedy: what to do, which ends it.
    """
    for text in texts:
        key = text.partition("=")[0].lstrip("+~")
        if re.split(r"[./@]", key)[0] in OF_SWEEP or key in OF_SWEEP_MEASURE:
            raise BadInput(
                f"{where} holds {hidden(text)}: {key} is a setting of the whole sweep and cannot "
                f"differ between its arms; {remedy}"
            )


def part(overrides: Iterable[Override]) -> tuple[list[tuple[Override, str, str]], list[str]]:
    """Split overrides into those of cells, as (override, key, text), and settings of the sweep, as
    texts."""
    measured, settings = [], []
    for override in overrides:
        key, text = override.get_key_element(), str(override.input_line)
        if is_setting(key):
            settings.append(text)
        else:
            measured.append((override, key, text))
    return measured, settings


def product(overrides: Iterable[Override], named: Iterable[str] = ()) -> Sweep:
    """The sweep of every combination of the overrides' values; later keys vary fastest.

    As in Hydra, the last override of a key wins. The name of an arm has the values that vary, and
    those of the keys `named`.

    Raises:
        BadInput: an override has a continuous interval or varies a setting of the whole sweep, or
            arms differ only in a secret.
    """
    choices: dict[str, list[str]] = {}
    varying: set[str] = set()
    overrides = list(overrides)
    swept = (str(one.input_line) for one in overrides if one.is_sweep_override())
    require_own(swept, "the sweep", "give it one value")
    measured, settings = part(overrides)
    for override, key, text in measured:
        if override.is_sweep_override():
            if not override.is_discrete_sweep():
                raise BadInput(
                    f"{text}: a sweep takes a list, range(...) or glob(...), not an interval"
                )
            expanded = itertools.islice(override.sweep_string_iterator(), MAX_ARMS + 1)
            values = [f"{key}={value}" for value in expanded]
            if not values:
                raise BadInput(f"{text}: matches nothing to sweep over")
            choices[key] = values
            varying.add(key)
        else:
            choices[key] = [text]
            varying.discard(key)
    varying.update(named)
    if math.prod(map(len, choices.values())) > MAX_ARMS:
        raise BadInput(
            f"{' '.join(sorted(varying))}: a sweep has at most {MAX_ARMS:,} arms; vary fewer values"
        )
    combinations = itertools.product(*choices.values())
    arms = tuple(
        dict.fromkeys(_arm(list(choices), combination, varying) for combination in combinations)
    )
    if len({arm.name for arm in arms}) < len(arms):
        raise BadInput(
            "arms of the sweep differ only in a secret, which is not part of a cell: give it "
            "one value"
        )
    return Sweep(arms, tuple(settings))


def _arm(keys: Sequence[str], combination: Sequence[str], varying: set[str]) -> Arm:
    # Sorted, because the name is part of the identity of a measurement.
    chosen = (text for key, text in zip(keys, combination, strict=True) if key in varying)
    named = sorted(hidden(text) for text in chosen)
    return Arm(" ".join(named or essential(combination)) or DEFAULT_ARM, tuple(combination))


@dataclass(frozen=True)
class Blocks:
    """The shuffled blocks of an ablation, and the design of its comparisons."""

    design: Design
    metric: str | None  # None: the records decide
    seed: int
    lossless: tuple[str, ...] = ()  # optimisations declared to leave outputs unchanged

    def record(self, arm: Arm, order: int) -> dict[str, Any]:
        """The field `ablation` of one measurement's record."""
        requires = {name: list(needed) for name, needed in self.design.requires.items() if needed}
        return {
            "design": self.design.kind,
            "metric": self.metric or USUAL,
            "named": self.metric is not None,
            "optimisations": list(self.design.names),
            "requires": requires,
            "on": list(arm.on),
            "order": order,
            "seed": self.seed,
            "lossless": list(self.lossless),
        }
