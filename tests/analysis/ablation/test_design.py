"""Designs: every comparison is of one optimisation alone, whatever requires what."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.analysis.ablation.design import BASELINE, Design, Kind
from minivllm.errors import BadInput
from minivllm.experiments.arms import shuffled

KINDS: tuple[Kind, ...] = ("leave_one_out", "add_one_in", "pairs", "factorial")


@st.composite
def designs(draw: st.DrawFn, most: int = 5) -> Design:
    """Any design over a few optimisations, each of which may require earlier ones."""
    names = "abcdefg"[: draw(st.integers(1, most))]
    requires = {
        name: tuple(draw(st.sets(st.sampled_from(names[:i])))) if i else ()
        for i, name in enumerate(names)
    }
    # a requirement may be named later than what requires it
    order = draw(st.permutations(list(names)))
    return Design(draw(st.sampled_from(KINDS)), {name: requires[name] for name in order})


@given(designs())
def test_arms_can_be_built_and_comparisons_are_of_one_optimisation(design: Design) -> None:
    arms = design.arms
    assert arms[0] == design.baseline and len(set(arms)) == len(arms)
    assert all(design.possible(chosen) for chosen in arms)
    labels = [design.label(chosen) for chosen in arms]
    assert len(set(labels)) == len(labels) and labels[0] == BASELINE
    assert [contrast.name for contrast in design.contrasts] == list(design.names)
    for contrast in design.contrasts:
        assert contrast.pairs
        for with_, without in contrast.pairs:
            assert with_ - without == {contrast.name} and without < with_
            assert {with_, without} <= set(arms)
    for pair in design.interactions:
        for both, first, second, neither in pair.quadruples:
            assert both - first == second - neither == {pair.second}
            assert both - second == first - neither == {pair.first}
            assert {both, first, second, neither} <= set(arms)


@given(designs(most=4))
def test_a_factorial_has_every_possible_arm(design: Design) -> None:
    full = Design("factorial", design.requires)
    every = itertools.chain.from_iterable(
        itertools.combinations(design.names, size) for size in range(len(design.names) + 1)
    )
    assert set(full.arms) == {frozenset(chosen) for chosen in every if design.possible(chosen)}


@given(designs(most=4))
def test_shapley_weights_are_those_of_the_orders_of_switching_on(design: Design) -> None:
    """By going through every order, as the definition does."""
    orders = [
        order
        for order in itertools.permutations(design.names)
        if all(design.possible(order[: i + 1]) for i in range(len(order)))
    ]
    for name, weights in design.shapley_weights().items():
        assert math.isclose(sum(weights.values()), 1.0)
        for (_, without), weight in weights.items():
            passing = sum(frozenset(order[: order.index(name)]) == without for order in orders)
            assert math.isclose(weight, passing / len(orders))


@given(designs(), st.integers(0, 2**31), st.integers(0, 50))
def test_a_block_holds_every_arm_once_in_an_order_of_its_own(
    design: Design, seed: int, block: int
) -> None:
    names = [design.label(chosen) for chosen in design.arms]
    order = shuffled(names, seed, block)
    assert sorted(order) == sorted(names)
    assert order == shuffled(reversed(names), seed, block)  # however the arms come


def test_orders_differ_from_block_to_block_and_seed_to_seed() -> None:
    names = [f"arm {i}" for i in range(8)]
    orders = {tuple(shuffled(names, seed, b)) for seed in range(3) for b in range(8)}
    assert len(orders) == 24
    firsts = [shuffled(names, 0, block)[0] for block in range(400)]
    assert {firsts.count(name) > 20 for name in names} == {True}  # no arm is always early


def test_two_arms_of_every_kind() -> None:
    requires = {"paging": (), "prefix": ("paging",), "batching": ()}
    labels = {
        kind: [Design(kind, requires).label(arm) for arm in Design(kind, requires).arms]
        for kind in KINDS
    }
    assert labels["leave_one_out"] == [
        "baseline",
        "without paging+prefix",
        "without prefix",
        "without batching",
    ]
    assert labels["add_one_in"] == [
        "baseline",
        "with paging",
        "with paging+prefix",
        "with batching",
    ]
    assert labels["pairs"] == [
        *labels["add_one_in"],
        "with paging+batching",
        "with paging+prefix+batching",
    ]
    assert len(labels["factorial"]) == 6  # of 8: prefix never without paging


def test_requirements_that_cannot_be_met_are_refused() -> None:
    with pytest.raises(BadInput, match="b requires c, which is not among"):
        Design("pairs", {"a": (), "b": ("c",)})
    with pytest.raises(BadInput, match="requires itself"):
        Design("pairs", {"a": ("b",), "b": ("a",)})
