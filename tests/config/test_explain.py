"""Names of other tools are answered with what to write here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from minivllm.config.compose import compose
from minivllm.config.explain import elsewhere
from minivllm.errors import BadInput

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_every_flag_that_the_docs_translate_is_answered() -> None:
    rows = re.findall(r"^\| (`[^|]*) \|", (DOCS / "coming-from-vllm.md").read_text(), re.MULTILINE)
    flags = {flag for row in rows for flag in re.findall(r"--[a-z][a-z-]+", row)}
    assert len(flags) > 35
    assert {flag for flag in flags if elsewhere(flag) is None} == set()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no-enable-chunked-prefill", "batching.chunked_prefill=false here"),
        ("no_async_scheduling", "runtime.overlap=false here"),
        ("no-enforce-eager", "runtime.cuda_graphs=true here"),
        ("no_enable_lora", None),
        ("no_such_thing", None),
        ("reasoning-parser", "found in the checkpoint"),
    ],
)
def test_flags_that_turn_off_and_those_that_nothing_needs(name: str, words: str | None) -> None:
    hint = elsewhere(name)
    assert hint is None if words is None else hint is not None and hint.endswith(words)


@pytest.mark.parametrize("name", ["flex", "torch_varlen"])
def test_an_option_that_was_removed_names_what_to_use(name: str) -> None:
    with pytest.raises(BadInput, match="no such option any more; use attention=triton or "):
        compose([f"attention={name}"])
