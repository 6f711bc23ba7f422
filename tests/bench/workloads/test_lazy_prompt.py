"""Random prompts hold no token that an engine acts on, whatever makes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minivllm.bench.workloads.lazy_prompt import LazyPrompt, draw_ids, drawable
from minivllm.bench.workloads.workload import Workload
from minivllm.config.compose import build, compose
from minivllm.errors import BadInput

RESERVED = (range(2), range(7, 40), range(48, 50))
VOCAB = 50


def drawn(*overrides: str) -> Workload:
    node = compose([*overrides])["workload"]
    made: Workload = build(node).generate(None, VOCAB, 4096, 0, reserved=RESERVED)
    return made


@pytest.mark.parametrize(
    "name", ["chat", "shared_prefix", "multi_turn", "agentic", "trace", "file"]
)
def test_reserved_ids_are_never_drawn(name: str, tmp_path: Path) -> None:
    overrides = [f"workload={name}"]
    if name in ("trace", "file"):
        path = tmp_path / "requests.jsonl"
        row: dict[str, Any] = {"timestamp": 0, "input_length": 600, "output_length": 4}
        row |= {"hash_ids": [1, 2]} if name == "trace" else {}
        path.write_text(json.dumps(row) + "\n")
        overrides.append(f"workload.path={path}")
    work = drawn(*overrides)
    ids = {token for request in work.requests for token in request.prompt_token_ids}
    assert ids == {*range(2, 7), *range(40, 48)}


def test_what_may_be_drawn_is_part_of_what_a_lazy_prompt_is() -> None:
    plain, reserved = (LazyPrompt((range(64),), VOCAB, 0, r) for r in ((), RESERVED))
    assert set(plain) - set(drawable(VOCAB, RESERVED).tolist())
    assert set(reserved) <= set(drawable(VOCAB, RESERVED).tolist())
    assert plain != reserved and tuple(reserved) == tuple(LazyPrompt(*astuple(reserved)))


def astuple(prompt: LazyPrompt) -> tuple[Any, ...]:
    return prompt.runs, prompt.vocab_size, prompt.seed, prompt.reserved


def test_a_vocabulary_of_special_tokens_alone_makes_no_prompt() -> None:
    with pytest.raises(BadInput, match="all 4 token ids are special"):
        draw_ids(3, 4, (range(4),), np.random.default_rng(0))
