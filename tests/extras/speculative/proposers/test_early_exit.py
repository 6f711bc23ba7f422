"""The first layers and a part of the head, against transformers and against the whole head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minivllm import LLM
from minivllm.errors import BadInput
from minivllm.extras.speculative.proposers.early_exit import EarlyExit
from minivllm.kernels.cpu.linear import PanelLinear
from tests.extras.speculative.drafting import load
from tests.reference import CausalAttention, make_batch, make_checkpoint


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "mistral"])
def test_it_is_the_model_without_its_last_layers(tmp_path: Path, family: str) -> None:
    theirs = make_checkpoint(tmp_path, family)
    tokens = [5, 9, 60, 7, 7, 31, 2, 88, 13]
    with load(tmp_path) as llm, torch.inference_mode():
        model = llm.engine.loaded.model
        batch = make_batch([tokens])._replace(logit_rows=torch.arange(len(tokens)))
        attention = CausalAttention(model.attention_specs)
        whole = model.compute_logits(model(batch, attention))
        for layers in (1, 2):
            states = theirs(torch.tensor([tokens]), output_hidden_states=True).hidden_states
            expected = theirs.lm_head(theirs.model.norm(states[layers]))[0]
            if (cap := model.config.final_soft_cap) is not None:
                expected = torch.tanh(expected / cap) * cap
            exit_ = EarlyExit(model, layers)
            found = exit_.compute_logits(exit_(batch, attention))
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)
        again = model.compute_logits(model(batch, attention))
        assert torch.equal(again, whole), "the target has lost something"
        with pytest.raises(BadInput, match="exit_layer=3: the model has 3 layers"):
            EarlyExit(model, 3)


@pytest.mark.parametrize(
    ("quant", "knobs"),
    [
        ("fp32", []),
        ("fp16", []),
        ("bf16", []),
        ("bf16", ["runtime.cpu_kernels=off"]),
        ("int8", ["quant.lm_head=true"]),
        ("int4", ["quant.lm_head=true"]),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_the_first_tokens_have_the_logits_of_the_whole_head(
    tmp_path: Path, quant: str, knobs: list[str], tied: bool
) -> None:
    """However the head is stored: as a matrix, in an order of oneDNN's, in panels of 64 rows."""
    make_checkpoint(tmp_path, vocab_size=200, hidden_size=128, tie_word_embeddings=tied)
    with load(tmp_path, *knobs, quant=quant) as llm, torch.inference_mode():
        model = llm.engine.loaded.model
        hidden = torch.randn(5, 128).to(model.dtype)
        whole = model.compute_logits(hidden)
        for count in (1, 64, 100, 199, 200, 1000):
            try:
                part = EarlyExit(model, 2, count).compute_logits(hidden)
            except BadInput as error:  # without the kernels, codes are no matrix of floats
                assert quant in ("int8", "int4") and "head_tokens=null" in str(error)
                assert not isinstance(model.lm_head, PanelLinear)
                return
            torch.testing.assert_close(part[:, :count], whole[:, :count])
            assert part.shape == whole.shape
            assert part.isfinite().all() and (part[:, count:] < -6e4).all()


def test_a_head_of_another_form_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    with LLM(str(tmp_path), device="cpu", quant="fp32") as llm:
        model = llm.engine.loaded.model
        model.lm_head = torch.nn.Identity()
        with pytest.raises(BadInput, match="stored in another form"):
            EarlyExit(model, 2, 64)
        EarlyExit(model, 2)
