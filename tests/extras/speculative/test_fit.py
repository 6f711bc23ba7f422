"""Drafts that do not fit the model are one line before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from minivllm import LLM, fit
from minivllm.config.compose import compose
from tests.told_early import assert_told_before_weights

WRONG = [
    (["speculative=early_exit", "speculative.exit_layer=8"], "speculative.exit_layer=8"),
    (["speculative=early_exit", "speculative.head_tokens=99999"], "speculative.head_tokens=99999"),
    (
        ["speculative=draft", "model@speculative.model=hf", "speculative.model.path=no/such/place"],
        "speculative.model.path",
    ),
    (
        [
            "speculative=draft",
            "model@speculative.model=tiny",
            "speculative.model.max_model_len=512",
        ],
        "its context has 512 tokens and the target's 2048",
    ),
]


@pytest.mark.parametrize(("overrides", "words"), WRONG, ids=[words for _, words in WRONG])
def test_it_is_said_before_weights_are_loaded(
    overrides: list[str], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = compose([*overrides, "runtime.device=cpu", f"runs_dir={tmp_path}"])
    assert_told_before_weights(config, words, monkeypatch)


@pytest.mark.parametrize("drafts", ["none", "ngram", "draft"])
def test_drafts_that_need_no_more_than_the_target_ask_nothing_of_its_files(
    drafts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finding a checkpoint may mean asking the hub, which loading does anyway."""

    def find(*args: object, **kwargs: object) -> None:
        raise AssertionError("the checkpoint is looked for")

    monkeypatch.setattr(fit, "resolve", find)
    config = compose([f"speculative={drafts}", "runtime.device=cpu"])
    fit.require_fit(fit.Config.of(config))
    early = compose(["speculative=early_exit", "runtime.device=cpu"])
    with pytest.raises(AssertionError, match="looked for"):
        fit.require_fit(fit.Config.of(early))


def test_what_fits_is_served() -> None:
    knobs = ["runtime.threads=1", "speculative.exit_layer=7"]
    with LLM("tiny", device="cpu", speculative="early_exit", overrides=knobs) as llm:
        assert llm.generate([1, 2, 3])[0].outputs[0].token_ids
