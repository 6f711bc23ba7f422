"""Designs: which sets of optimisations are measured, and which of them are compared. Pure, and free
of configuration."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from minivllm.errors import BadInput

Kind = Literal["leave_one_out", "add_one_in", "pairs", "factorial"]
Chosen = frozenset[str]  # the optimisations that are on

BASELINE = "baseline"
AGAIN = "baseline again"  # the A/A arm: the same cell under another name


@dataclass(frozen=True)
class Contrast:
    """The comparison of one optimisation: pairs of arms, with it and without it, the same in all
    else.

    One pair, or, in a factorial, one for each set of the others.
    """

    name: str
    pairs: tuple[tuple[Chosen, Chosen], ...]


@dataclass(frozen=True)
class PairContrast:
    """The comparison of two together: arms with both, with the first, with the second, with
    neither."""

    first: str
    second: str
    quadruples: tuple[tuple[Chosen, Chosen, Chosen, Chosen], ...]


@dataclass(frozen=True)
class Design:
    """A kind of ablation over optimisations.

    Args:
        kind: `leave_one_out` compares all with all but one; `add_one_in` none with one; `pairs`
            adds every two; `factorial` is every combination.
        requires: each optimisation, in order, with those that must be on for it to be on. An arm
            with an optimisation has what it requires; an arm without one has none of those that
            require it.

    Raises:
        BadInput: a requirement is not in the list, or goes round in a circle.
    """

    kind: Kind
    requires: Mapping[str, tuple[str, ...]]

    def __post_init__(self) -> None:
        for name, needed in self.requires.items():
            for other in needed:
                if other not in self.requires:
                    raise BadInput(
                        f"ablation: {name} requires {other}, which is not among the optimisations "
                        f"({', '.join(self.requires)}): add it, or leave {name} out"
                    )
            if name in self._above(name):
                raise BadInput(f"ablation: {name} requires itself, by way of {', '.join(needed)}")

    @property
    def names(self) -> tuple[str, ...]:
        """The optimisations, in their order."""
        return tuple(self.requires)

    def _above(self, name: str) -> Chosen:
        """All that `name` requires, directly or not."""
        names: set[str] = set()
        todo = list(self.requires[name])
        while todo:
            other = todo.pop()
            if other not in names:
                names.add(other)
                todo += self.requires[other]
        return frozenset(names)

    def _below(self, name: str) -> Chosen:
        """All that require `name`, directly or not."""
        return frozenset(other for other in self.names if name in self._above(other))

    def possible(self, chosen: Iterable[str]) -> bool:
        """Whether every optimisation that is on has what it requires."""
        chosen = frozenset(chosen)
        return all(self._above(name) <= chosen for name in chosen)

    @property
    def baseline(self) -> Chosen:
        """What the others are changed from: everything on for leave_one_out, nothing for the other
        kinds."""
        return frozenset(self.names if self.kind == "leave_one_out" else ())

    @cached_property
    def contrasts(self) -> tuple[Contrast, ...]:
        """One for each optimisation, in order."""
        if self.kind == "factorial":
            return tuple(
                Contrast(
                    name,
                    tuple(
                        (with_, with_ - {name})
                        for with_ in self._every
                        if self._removable(name, with_)
                    ),
                )
                for name in self.names
            )
        if self.kind == "leave_one_out":
            with_ = [frozenset(self.names) - self._below(name) for name in self.names]
        else:
            with_ = [self._above(name) | {name} for name in self.names]
        return tuple(
            Contrast(name, ((chosen, chosen - {name}),))
            for name, chosen in zip(self.names, with_, strict=True)
        )

    def _removable(self, name: str, chosen: Chosen) -> bool:
        return name in chosen and not self._below(name) & chosen

    @cached_property
    def interactions(self) -> tuple[PairContrast, ...]:
        """One for every two of which neither requires the other; none for the kinds that do not
        measure them."""
        contrasts = []
        for first, second in itertools.combinations(self.names, 2):
            if first in self._above(second) or second in self._above(first):
                continue
            both: list[Chosen] = []
            if self.kind == "factorial":
                both = [
                    s
                    for s in self._every
                    if self._removable(first, s) and self._removable(second, s)
                ]
            elif self.kind == "pairs":
                both = [self._above(first) | self._above(second) | {first, second}]
            quadruples = tuple((s, s - {second}, s - {first}, s - {first, second}) for s in both)
            if quadruples:
                contrasts.append(PairContrast(first, second, quadruples))
        return tuple(contrasts)

    @cached_property
    def _every(self) -> tuple[Chosen, ...]:
        """All possible sets, the smaller first."""
        return tuple(
            frozenset(chosen)
            for size in range(len(self.names) + 1)
            for chosen in itertools.combinations(self.names, size)
            if self.possible(chosen)
        )

    @cached_property
    def arms(self) -> tuple[Chosen, ...]:
        """Every set that is to be measured, each once, the baseline first."""
        if self.kind == "factorial":
            return self._every
        arms = [
            chosen
            for contrast in self.contrasts
            for pair in contrast.pairs
            for chosen in pair[::-1]
        ]
        arms += [s for pair in self.interactions for four in pair.quadruples for s in four[::-1]]
        return tuple(dict.fromkeys([self.baseline, *arms]))

    def label(self, chosen: Chosen) -> str:
        """An arm's name: what it differs in from the baseline."""
        if chosen == self.baseline:
            return BASELINE
        differing = chosen ^ self.baseline
        listed = "+".join(name for name in self.names if name in differing)
        return f"{'without' if self.kind == 'leave_one_out' else 'with'} {listed}"

    def shapley_weights(self) -> dict[str, dict[tuple[Chosen, Chosen], float]]:
        """For each optimisation the weight of each pair (with, without) in its Shapley value.

        A pair's weight is the share of the orders in which all can be switched on, one after
        another, that pass through it; with requirements, of the orders that keep to them (Shapley
        1953; Faigle and Kern 1992). Weights of an optimisation sum to 1.
        """
        everything = frozenset(self.names)
        ways_to: dict[Chosen, int] = {frozenset(): 1}
        for chosen in self._every[1:]:
            ways_to[chosen] = sum(
                ways_to[chosen - {n}] for n in chosen if self._removable(n, chosen)
            )
        ways_from: dict[Chosen, int] = {everything: 1}
        for chosen in reversed(self._every[:-1]):
            added = (chosen | {name} for name in everything - chosen)
            ways_from[chosen] = sum(ways_from[wider] for wider in added if wider in ways_from)
        orders = ways_to[everything]
        return {
            contrast.name: {
                (with_, without): ways_to[without] * ways_from[with_] / orders
                for with_, without in contrast.pairs
            }
            for contrast in Design("factorial", self.requires).contrasts
        }
