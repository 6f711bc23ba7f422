"""Which replicas are wanted when their number changes; nothing is started."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from minivllm.parallel.options import ParallelOptions
from minivllm.processes.link import EngineLink
from minivllm.serving.processes.replicas import Replicas


class Link:
    """Stands in for an EngineLink."""

    def __init__(self, number: int) -> None:
        self.number, self.is_alive, self.is_wanted = number, True, True


def replicas(count: int, **knobs: Any) -> Replicas:
    def make(number: int) -> EngineLink:
        return cast(EngineLink, Link(number))

    return Replicas(ParallelOptions(replicas=count, **knobs), make)


def wanted(of: Replicas) -> list[int]:
    return [link.number for link in of.wanted]


def test_the_dead_and_the_last_are_taken_away_first() -> None:
    four = replicas(4)
    four.links[1].is_alive = False
    four.resize(3)
    assert wanted(four) == [0, 2, 3]
    four.resize(1)
    assert wanted(four) == [0] and four.states()["draining"] == 2
    four.resize(3)  # those that still live come first
    assert wanted(four) == [0, 2, 3]
    four.resize(6)
    assert wanted(four) == [0, 1, 2, 3, 4, 5]


def test_those_that_compute_prompts_stay() -> None:
    apart = replicas(4, disaggregated=True, prefill_replicas=2)
    apart.links[0].is_alive = False
    apart.resize(3)
    assert wanted(apart) == [0, 1, 2] and apart.can_serve
    apart.links[1].is_alive = False
    assert not apart.can_serve


def test_one_that_drains_stays_in_the_place_of_one_that_dies() -> None:
    apart = replicas(4, disaggregated=True, prefill_replicas=1)
    apart.resize(3)
    prompts, dead, _, spare = apart.links
    assert apart.replace(prompts) is None  # of another kind
    assert apart.replace(dead) is spare and wanted(apart) == [0, 2, 3]


@given(st.lists(st.tuples(st.integers(1, 6), st.sets(st.integers(0, 5))), max_size=20))
def test_so_many_are_wanted_as_were_asked_for(changes: list[tuple[int, set[int]]]) -> None:
    group = replicas(3)
    for count, alive in changes:
        for link in group.links:
            link.is_alive = link.number in alive
        before = [link for link in group.wanted if link.is_alive]
        group.resize(count)
        states = group.states()
        assert len(group.wanted) == states["replicas"] == count
        assert count == states["serving"] + states["starting"] + states["stopped"]
        assert [link.number for link in group.links] == list(range(len(group.links)))
        lost = [one for one in before if not one.is_wanted]
        dead = [one for one in group.wanted if not one.is_alive]
        assert not (lost and dead), "one that serves goes while a dead one stays"
