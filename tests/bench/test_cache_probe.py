"""A server that keeps prompts without saying so is named, and no other."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from minivllm.bench.cache_probe import undeclared_cache
from minivllm.bench.targets.base import EngineOutput
from minivllm.engine.options import SamplingParams
from tests.bench.scripted import ScriptedClock, ScriptedEngine


@dataclass
class Keeper(ScriptedEngine):
    """Takes a second for a new prompt, and a tenth for one that it knows.

    Attributes:
        keeps: whether it knows any.
        reports: whether it says how much it found.
    """

    keeps: bool = True
    reports: bool = False
    known: set[tuple[int, ...]] = field(default_factory=set)
    asked: list[tuple[int, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.info.keeps_prefixes = True

    def submit(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        self.submitted.clear()
        prompt = tuple(prompt_token_ids)
        self.asked.append(prompt)
        self.step_s = 0.1 if prompt in self.known else 1.0
        self.found = len(prompt) if prompt in self.known else 0
        self.known |= {prompt} if self.keeps else set()
        super().submit(request_id, prompt_token_ids, params)

    def poll(self, timeout_s: float | None = None) -> list[EngineOutput]:
        outputs = super().poll(timeout_s)
        return [replace(o, cached_tokens=self.found if self.reports else None) for o in outputs]


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
