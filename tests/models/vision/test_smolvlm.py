"""SmolVLM beside transformers: pixels to the bit, logits within 1e-4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm import LLM
from tests.seeing import IMAGE_TOKEN, make_smolvlm, picture, smolvlm_processor

SIZES = [
    [(50, 30)],
    [(17, 33)],
    [(32, 32)],
    [(1, 40)],
    [(400, 3)],
    [(50, 30), (91, 200)],
    [(64, 64), (64, 64), (7, 5)],
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The model of transformers, and the same one here."""
    folder: Path = tmp_path_factory.mktemp("smolvlm")
    reference = make_smolvlm(folder)
    overrides = ["runtime.threads=1", "cache.num_blocks=64", "batching.max_num_batched_tokens=128"]
    with LLM(str(folder), quant="fp32", device="cpu", overrides=overrides) as llm:
        yield reference, llm


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@torch.no_grad()
def test_logits_of_text_and_images_match_transformers(sizes: list[Any], models: Any) -> None:
    reference, llm = models
    pictures = [picture(*size, seed=i) for i, size in enumerate(sizes)]
    prompt = [5, 6]
    for i in range(len(pictures)):
        prompt += [IMAGE_TOKEN, 7 + i, 9]
    logits = llm.logits({"prompt_token_ids": prompt, "multi_modal_data": {"image": pictures}})
    whole, inputs = llm.pictures.insert(prompt, pictures)
    pixels = smolvlm_processor()(images=[pictures], return_tensors="pt")
    wanted = reference(
        input_ids=torch.tensor([whole]),
        pixel_values=pixels["pixel_values"],
        pixel_attention_mask=pixels["pixel_attention_mask"],
    ).logits[0]
    assert len(inputs.spans) >= 1 and wanted.std() > 0.3
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)
    bare = llm.logits(whole)  # the same tokens without their images
    assert (bare - wanted).abs().max() > 0.1
