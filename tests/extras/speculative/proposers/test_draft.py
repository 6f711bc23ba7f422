"""A second model, or the target in another precision, that drafts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minivllm import LLM
from minivllm.errors import BadInput
from minivllm.extras.speculative.proposers.draft import DraftProposer
from minivllm.extras.speculative.proposers.model_drafts import widen
from tests.engine.byte_tokenizer import byte_tokenizer
from tests.engine.traffic import GREEDY, Asked
from tests.extras.speculative.drafting import LONGEST, load, same, speculator
from tests.reference import make_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    make_checkpoint(path)
    return path


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[LLM]:
    with load(folder) as llm:
        yield llm


def second(folder: Path, *knobs: str) -> list[str]:
    chosen = ["speculative=draft", "model@speculative.model=hf", f"speculative.model.path={folder}"]
    return [*chosen, *knobs, "speculative.adaptive=false"]


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_a_model_of_any_family_drafts(
    folder: Path, plain: LLM, tmp_path: Path, family: str
) -> None:
    """With other layers, heads and windows than the target's, in a cache of its own."""
    make_checkpoint(tmp_path, family, num_hidden_layers=2, num_key_value_heads=4)
    asked = [Asked([20 + i, 21, 22], GREEDY) for i in range(4)]
    with load(folder, *second(tmp_path), "quant@speculative.quant=bf16") as llm:
        same(llm.engine, plain.engine, asked)
        drafts = speculator(llm.engine).proposer
        assert isinstance(drafts, DraftProposer) and drafts.own_cache
        assert drafts.executor.attention is not llm.engine.runner.attention  # type: ignore[attr-defined]
        assert speculator(llm.engine).counters.num_draft_tokens > 0


def test_a_second_models_keys_and_values_are_paid_for(folder: Path, tmp_path: Path) -> None:
    """Where blocks fill a share of the memory, a token takes the bytes of both models."""
    make_checkpoint(tmp_path, num_hidden_layers=2)
    with load(folder, *second(tmp_path), "quant@speculative.quant=fp32") as llm:
        drafts = speculator(llm.engine).proposer
        assert isinstance(drafts, DraftProposer)
        # two layers of two heads of 16 numbers in 4 bytes, keys and values
        assert drafts.load(lambda *_: drafts.loaded) == 2 * 2 * 2 * 16 * 4
    with load(folder, "speculative=draft", "quant@speculative.quant=int4") as llm:
        drafts = speculator(llm.engine).proposer
        assert isinstance(drafts, DraftProposer) and not drafts.own_cache
        assert drafts.load(lambda *_: drafts.loaded) == 0
        assert drafts.executor.attention is llm.engine.runner.attention  # type: ignore[attr-defined]


def test_models_that_do_not_fit_together_are_refused(folder: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, vocab_size=130)
    with pytest.raises(BadInput, match=r"vocabularies of 130 and 128.*same tokenizer"):
        load(folder, *second(tmp_path))
    make_checkpoint(tmp_path)
    knob = f"speculative.model.max_model_len={LONGEST - 1}"
    with pytest.raises(BadInput, match=r"has 95 tokens and the target's 96; lower model.max_model"):
        load(folder, *second(tmp_path, knob))


def test_a_tokenizer_tells_more_than_the_number_of_tokens(tmp_path: Path) -> None:
    """Padded embeddings of one tokenizer fit together; other tokens do not."""
    target, padded, other = (tmp_path / name for name in ("target", "padded", "other"))
    for path, size in ((target, 257), (padded, 264), (other, 257)):
        make_checkpoint(path, vocab_size=size, eos_token_id=256)
        byte_tokenizer(path)
    file = other / "tokenizer.json"
    file.write_text(file.read_text().replace('"<end>"', '"<other>"'))
    config = other / "tokenizer_config.json"
    config.write_text(config.read_text().replace("<end>", "<other>"))
    asked = [Asked([20 + i, 21, 22], GREEDY) for i in range(4)]
    with load(target) as plain, load(target, *second(padded)) as llm:
        same(llm.engine, plain.engine, asked)
    with pytest.raises(BadInput, match="same tokenizer"):
        load(target, *second(other))


@pytest.mark.parametrize("verify", ["same_noise", "rejection"])
@pytest.mark.parametrize(("own", "vocab"), [(257, 264), (264, 257)])
def test_padding_of_one_model_alone_fails_nobody(
    tmp_path: Path, own: int, vocab: int, verify: str
) -> None:
    """Masks, biases, penalties and prompts name the target's tokens; greedy, so that both verdicts
    give the same."""
    folders = tmp_path / "own", tmp_path / "target"
    for path, size in zip(folders, (own, vocab), strict=True):
        make_checkpoint(path, vocab_size=size, eos_token_id=256)
        byte_tokenizer(path)
    last = vocab - 1
    asked = [
        Asked([20, 21, 22], replace(GREEDY, token_mask=lambda _, out: range(200))),
        Asked([20, 21, 23], replace(GREEDY, token_mask=lambda _, out: [last])),
        Asked([20, 21, 24], replace(GREEDY, token_mask=lambda _, out: torch.ones(vocab) > 0)),
        Asked([20, 21, 25], replace(GREEDY, logit_bias={last: 90.0}, frequency_penalty=0.1)),
        Asked([20, last, 26], replace(GREEDY, repetition_penalty=1.3)),
        Asked([last, 27], GREEDY),
    ]
    knobs = second(folders[0], f"speculative.verify={verify}")
    with load(folders[1]) as plain, load(folders[1], *knobs) as llm:
        same(llm.engine, plain.engine, asked)
        assert speculator(llm.engine).counters.num_accepted_tokens > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_logits_are_brought_to_the_targets_width(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]], dtype=dtype)
    assert torch.equal(widen(logits, 2), logits[:, :2]) and torch.equal(widen(logits, 3), logits)
    wider = widen(logits, 5)
    assert torch.equal(wider[:, :3], logits) and wider.dtype == dtype
    assert wider.isfinite().all() and (wider[:, 3:] < -6e4).all()
