"""Making workloads for an engine: once, and messages by the model's own chat template."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minivllm.bench.making import WorkloadMaker
from minivllm.bench.workloads.synthetic import Smoke
from minivllm.models.load.tokenizer import DATE, Tokenizer
from tests.bench.scripted import ScriptedClock, ScriptedEngine
from tests.chat_template import templated_tokenizer


@pytest.fixture
def tokenizer() -> Tokenizer:
    return templated_tokenizer()


def test_a_workload_is_made_once_for_measurements_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = [], Smoke.make
    monkeypatch.setattr(Smoke, "make", lambda self, *args: made.append(args) or make(self, *args))  # type: ignore[func-returns-value]
    engine, maker = ScriptedEngine(ScriptedClock()), WorkloadMaker()
    node = {"_target_": "minivllm.bench.workloads.synthetic.Smoke", "num_requests": 2}
    works = [maker.make(engine, node, seed) for seed in (0, 0, 1)]
    assert works[0] is works[1] and works[0] != works[2] and len(made) == 2


def test_a_template_is_used_for_a_file_of_messages(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}))
    engine: Any = SimpleNamespace(
        tokenizer=tokenizer,
        info=SimpleNamespace(
            vocab_size=5000, max_model_len=2048, takes_chat=False, eos_token_ids=(7,)
        ),
        encode=tokenizer.encode,
        text=lambda ids: tokenizer.decode(ids),
    )
    work = WorkloadMaker().make(
        engine, {"_target_": "minivllm.bench.workloads.from_file.file.File", "path": str(path)}, 0
    )
    assert [request.text for request in work.requests] == [f"<user>hi{DATE}<a>"] and not work.notes
