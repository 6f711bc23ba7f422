"""Which cells a sweep has: arms, each a name and a list of overrides."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.types import Override

from minivllm.analysis.design import Design
from minivllm.analysis.metric import USUAL
from minivllm.bench.records.identity import NEUTRAL_MEASURE, digest
from minivllm.bench.records.measurement import DEFAULT_ARM
from minivllm.config.overrides import hidden
from minivllm.errors import BadInput

SETTINGS = "sweep."  # overrides that say how to run the sweep, not what is in it
MAX_ARMS = 10_000  # composing one takes a fifth of a second
NEUTRAL = (
    "name",
    "runs_dir",
    "reports_dir",
    "ablation.max_arms",
)  # where things go; not part of a sweep's definition


@dataclass(frozen=True)
class Arm:
    """One cell of a sweep: its name, and all overrides that make it."""

    name: str
    overrides: tuple[str, ...]
    on: tuple[str, ...] = ()  # of an ablation: its optimisations


@dataclass(frozen=True)
class Sweep:
    """What a command asks for: its arms, and how to run them."""

    arms: tuple[Arm, ...]
    settings: tuple[str, ...]  # overrides of the `sweep` node, common to all arms
    blocks: Blocks | None = None  # of an ablation

    def definition(self) -> list[list[str]]:
        """The overrides of every arm, in an order that does not depend on how they were written."""
        return sorted(essential(arm.overrides) for arm in self.arms)

    def hash(self) -> str:
        """Equal for equal definitions, so that the same command finds its records again."""
        return digest(self.definition())


def essential(overrides: Iterable[str]) -> list[str]:
    """The overrides that change what is measured, without secrets, in an order that does not depend
    on how they were written."""
    return sorted(hidden(text) for text in overrides if not _neutral(text))


def _neutral(override: str) -> bool:
    """Whether an override changes where things go or how they are taken down, but not what is
    measured."""
    key = override.partition("=")[0].lstrip("+~")
    if key == "measure.quality":  # changes no cell, but there is more to measure
        return False
    group, _, knob = key.partition(".")
    return (
        key in NEUTRAL
        or group in ("report", "tracker")
        or (group == "measure" and knob.split(".")[0] in NEUTRAL_MEASURE)
    )


def is_setting(override: str) -> bool:
    """Whether it says how to run the sweep, not what is in it."""
    return override.lstrip("+~").startswith(SETTINGS)


def part(overrides: Iterable[Override]) -> tuple[list[tuple[Override, str, str]], list[str]]:
    """What is measured, as (override, key, text), and the settings of the sweep, as texts."""
    measured, settings = [], []
    for override in overrides:
        key, text = override.get_key_element(), str(override.input_line)
        if is_setting(key):
            settings.append(text)
        else:
            measured.append((override, key, text))
    return measured, settings


def product(overrides: Iterable[Override], named: Iterable[str] = ()) -> Sweep:
    """Every combination of the values that the overrides give, later keys varying fastest.

    As everywhere in Hydra, a key given twice counts as given last. An arm is named by the values
    that vary, and by those of the keys `named`.

    Raises:
        BadInput: an override asks for a search over a continuous interval, or arms differ in a
            secret alone.
    """
    choices: dict[str, list[str]] = {}
    varying: set[str] = set()
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
            "arms of the sweep differ in a secret alone, which makes no other cell: give it one "
            "value"
        )
    return Sweep(arms, tuple(settings))


def _arm(keys: Sequence[str], combination: Sequence[str], varying: set[str]) -> Arm:
    # In an order that does not depend on how they were written: the name is part of a measurement's
    # identity.
    chosen = (text for key, text in zip(keys, combination, strict=True) if key in varying)
    named = sorted(hidden(text) for text in chosen)
    return Arm(" ".join(named or essential(combination)) or DEFAULT_ARM, tuple(combination))


@dataclass(frozen=True)
class Blocks:
    """What an ablation adds to a sweep: its arms are measured in shuffled blocks and compared as
    designed."""

    design: Design
    metric: str | None  # None: the records decide
    seed: int
    lossless: tuple[str, ...] = ()  # optimisations that are declared to change no output

    def record(self, arm: Arm, order: int) -> dict[str, Any]:
        """The record's `ablation` for one measurement."""
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
