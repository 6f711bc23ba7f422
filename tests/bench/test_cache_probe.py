"""A server that keeps prompts without saying so is named, and no other."""

from __future__ import annotations

import pytest

from minivllm.bench.cache_probe import undeclared_cache
from tests.bench.lying import Keeper
from tests.bench.scripted import ScriptedClock


@pytest.mark.parametrize(
    ("keeps", "reports", "named", "requests"),
    [(True, False, True, 9), (True, True, False, 3), (False, False, False, 3)],
)
def test_a_cache_that_nobody_declared(
    keeps: bool, reports: bool, named: bool, requests: int
) -> None:
    engine = Keeper(ScriptedClock(5.0), keeps=keeps, reports=reports)
    notes = undeclared_cache(engine, engine.clock)
    assert bool(notes) is named and len(engine.asked) == requests
    assert not named or (
        "has had before in 100.0 ms and a new one in 1000.0 ms, and reports no token" in notes[0]
    )
    assert all(0 not in prompt and len(prompt) == 250 for prompt in engine.asked)  # 0 ends answers
    assert not engine.waiting and not engine.running and not engine.submitted


def test_a_cache_that_can_be_emptied_is_not_asked() -> None:
    engine = Keeper(ScriptedClock())
    engine.info.keeps_prefixes = False
    assert undeclared_cache(engine, engine.clock) == [] and not engine.asked


def test_a_server_that_fails_is_not_judged() -> None:
    engine = Keeper(ScriptedClock(), refuse={"cache-first", "cache-0"})
    assert undeclared_cache(engine, engine.clock) == []
