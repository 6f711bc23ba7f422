"""Words in place of overrides, at the beginning of a command."""

from __future__ import annotations

from pathlib import Path

import pytest

from minivllm.config.words import as_overrides, model_overrides
from minivllm.errors import BadInput


@pytest.mark.parametrize(
    ("command", "overrides"),
    [
        ([], []),
        (["quant=int8", "serve"], ["quant=int8", "serve"]),  # no first word: Hydra refuses it
        (["--cfg", "job"], ["--cfg", "job"]),
        (["+ablation=pairs"], ["+ablation=pairs"]),
        (["~tracker"], ["~tracker"]),
        (["serve"], ["preset=serve"]),
        (["chat", "qwen3", "quant=int8"], ["preset=chat", "model=qwen3", "quant=int8"]),
        (["bench"], ["task=bench"]),
        (["bench", "a/b"], ["task=bench", "model=hf", "model.path='a/b'"]),
        (["-m", "bench", "quant=int8,nf4"], ["-m", "task=bench", "quant=int8,nf4"]),
        (["report"], ["task=report"]),
        (["compare", "before", "it's"], ["task=compare", "runs=['before','it\\'s']"]),
    ],
)
def test_leading_words_name_a_task_and_what_it_works_on(
    command: list[str], overrides: list[str]
) -> None:
    assert as_overrides(command) == overrides


def test_a_word_that_is_no_task_is_answered_with_the_nearest() -> None:
    with pytest.raises(BadInput, match=r"^serv: no such task; did you mean serve\?"):
        as_overrides(["serv"])
    with pytest.raises(BadInput, match=r"^b: after the task chat one word may name the model"):
        as_overrides(["chat", "a", "b"])


def test_a_model_is_an_option_or_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("")
    assert model_overrides("tiny") == ["model=tiny"]
    assert model_overrides("mine") == ["model=hf", "model.path='mine'"]
    assert model_overrides("mine", tmp_path) == ["model=mine"]
    assert model_overrides("x" * 300)[0] == "model=hf"
