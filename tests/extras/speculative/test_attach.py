"""Which rules, lengths and verifiers the knobs give an engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from minivllm import LLM
from minivllm.extras.speculative.lengths import AdaptiveLengths, FixedLengths
from minivllm.extras.speculative.rejection import Rejection
from minivllm.extras.speculative.verification import GivenAcceptance, SameNoise
from tests.engine.traffic import GREEDY, Asked, serve
from tests.extras.speculative.drafting import load, speculator
from tests.reference import VARIANTS, make_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_checkpoint(path)
    return path


@pytest.fixture
def llm(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    knobs = [f"speculative.{knob}" for knob in request.param]
    with load(folder, "speculative=ngram", *knobs) as made:
        yield made


@pytest.mark.parametrize(
    ("llm", "kind"),
    [
        ((), SameNoise),
        (("verify=rejection",), Rejection),
        (("acceptance=0.5",), GivenAcceptance),
        (("acceptance=[0.9,0.5]",), GivenAcceptance),
    ],
    indirect=["llm"],
)
def test_verifiers(llm: LLM, kind: type) -> None:
    found = speculator(llm.engine)
    assert type(found.verifier) is kind
    assert found.needs_logits == (kind is Rejection)
    if isinstance(found.verifier, GivenAcceptance):
        assert found.verifier.rates in [(0.5,), (0.9, 0.5)]


@pytest.mark.parametrize(
    ("llm", "kind"),
    [((), AdaptiveLengths), (("adaptive=false", "num_speculative_tokens=5"), FixedLengths)],
    indirect=["llm"],
)
def test_lengths(llm: LLM, kind: type) -> None:
    found = speculator(llm.engine)
    assert type(found.lengths) is kind
    if isinstance(found.lengths, AdaptiveLengths):
        assert found.lengths.longest == 3
        assert 0 < found.lengths.step_ms(1) <= found.lengths.step_ms(64)
        assert found.lengths.draft_ms(64) == 0.0  # a look-up
    # measuring has left nothing behind
    assert llm.engine.cache.pool.num_used == 0
    llm.engine.cache.pool.check_integrity([])


@pytest.mark.parametrize("llm", [()], indirect=True)
def test_drafts_of_a_failed_step_are_withdrawn_before_any_other_rule_looks(llm: LLM) -> None:
    assert llm.engine.scheduler.rules[0] is speculator(llm.engine)
    assert llm.engine.launcher.speculation is speculator(llm.engine)


def test_no_draft_reaches_the_length_of_another_rotation(tmp_path: Path) -> None:
    """32 tokens have the short rotations, and from 33 on all have the long ones."""
    family, values = VARIANTS["phi3 longrope"]
    make_checkpoint(tmp_path, family, **values)
    seen: set[int] = set()
    with load(tmp_path, "speculative=ngram", "speculative.adaptive=false") as llm:
        engine = llm.engine
        plan = engine.scheduler.plan

        def planned():  # type: ignore[no-untyped-def]
            made = plan()
            seen.update(
                part.seq_len
                for part in made.scheduled
                if part.num_drafts and part.request.num_rotated_tokens < 33
            )
            return made

        engine.scheduler.plan = planned  # type: ignore[method-assign]
        serve(engine, [Asked([7, 8] * 8, GREEDY), Asked([7, 8, 9] * 9, GREEDY)])
    assert seen and max(seen) <= 32
