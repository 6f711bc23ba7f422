"""Quality within a session: engines that give no logits, logits that are not finite, and whether
speed notices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minivllm.bench import supervisor
from minivllm.bench.quality_evaluator import QualityEvaluator
from minivllm.bench.records import identity
from minivllm.bench.records.reading import read_records
from minivllm.bench.records.record import Record
from minivllm.errors import BadInput
from tests.bench.test_quality import CANDIDATE, REFERENCE, Markov, make_reference
from tests.bench.test_supervisor import importable as importable
from tests.bench.test_supervisor import make_config, plan


def make_record(**config: Any) -> Record:
    return Record("r", "c", "s", "a", 0, "ok", {"measure": {"quality": True}, **config})


def test_an_engine_without_logits_is_measured_and_says_so(tmp_path: Path) -> None:
    (measurement,) = plan(tmp_path, make_config(measure={"quality": True}))
    (outcome,) = supervisor.run([measurement])
    assert outcome.status == "ok"
    (record,) = read_records(tmp_path / "runs")
    assert record["quality"] is None and record["metrics"]["output_tokens_per_s"] > 0
    assert "engine=faulty gives no logits: quality was not measured" in record["validity"]["notes"]
    assert not (tmp_path / "runs" / "quality").exists()  # nobody needs a reference then


def test_quality_alone_needs_logits(tmp_path: Path) -> None:
    config = {**make_config(), "task": {"_target_": identity.QUALITY_TASK}}
    with pytest.raises(
        BadInput, match="task=quality needs logits, which engine=faulty does not give"
    ):
        supervisor.run(plan(tmp_path, config), lone=True)


def test_it_is_measured_once_for_each_reference(tmp_path: Path) -> None:
    events: list[str] = []
    evaluator, engine = (
        QualityEvaluator(lambda event, **details: events.append(event)),
        Markov(CANDIDATE),
    )
    found = make_reference(tmp_path, [0, 1, 2] * 30, 16, 8)
    first, second = make_record(), make_record()
    evaluator.fill(first, engine, found)
    asked = len(engine.seen)
    evaluator.fill(second, engine, found)
    assert first.quality == second.quality and first.quality is not None
    assert len(engine.seen) == asked and set(events) == {"quality"}
    assert not engine.waiting and not engine.running
    unasked = make_record(measure={"quality": False})
    evaluator.fill(unasked, engine, None)
    assert unasked.quality is None and unasked.validity.notes == []


def test_logits_that_are_not_finite_make_the_record_invalid(tmp_path: Path) -> None:
    record = make_record()
    with np.errstate(all="ignore"):
        found = make_reference(tmp_path, [0, 1, 2] * 30, 16, 8)
        QualityEvaluator(lambda event, **details: None).fill(
            record, Markov(np.full_like(REFERENCE, np.nan)), found
        )
    assert not record.validity.ok and "not finite" in record.validity.reasons[0]


def test_a_window_that_does_not_fit_is_refused_early(tmp_path: Path) -> None:
    found = make_reference(tmp_path, [0, 1, 2] * 30, 16, 8)

    def refuse(name: str, prompt: list[int], params: Any) -> None:
        assert len(prompt) == 15
        raise BadInput("too long")

    engine = Markov(CANDIDATE)
    with pytest.raises(BadInput, match="these are random"):
        QualityEvaluator.require_quality(engine.info, found, refuse)
    engine.info.weights = "checkpoint"
    with pytest.raises(BadInput, match=r"quality\.window=16: too long"):
        QualityEvaluator.require_quality(engine.info, found, refuse)


def test_a_text_of_ones_own_is_recorded_by_its_name() -> None:
    assert make_record(quality={"text": "/home/me/text.txt"}).config["quality"] == {
        "text": "text.txt"
    }
    assert make_record(quality={"text": "mine/text.txt"}).config["quality"] == {
        "text": "mine/text.txt"
    }
