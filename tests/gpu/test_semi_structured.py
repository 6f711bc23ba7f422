"""pruning.kernels=semi_structured on a GPU: the products of dense kernels, in fewer bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.passes.pruning.semi_structured import CAPABILITY, SemiStructuredLinear
from tests.reference import make_checkpoint

pytestmark = pytest.mark.gpu
PROMPTS = [list(range(3, 40)), [9, 8, 7], [5]]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("method", ["magnitude", "wanda"])
@pytest.mark.parametrize("quant", ["bf16", "fp16"])
def test_products_are_those_of_dense_kernels(method: str, quant: str, tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() < CAPABILITY:
        pytest.skip("this GPU has no sparse matrix units")
    sizes = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256}
    make_checkpoint(tmp_path, **sizes, num_attention_heads=4, num_key_value_heads=2)
    knobs = [f"pruning={method}", "pruning.pattern='2:4'", "runtime.cuda_graphs=false"]
    logits, sizes_of = [], []
    for kernels in ("dense", "semi_structured"):
        overrides = [*knobs, f"pruning.kernels={kernels}"]
        with LLM(str(tmp_path), device="cuda", quant=quant, overrides=overrides) as llm:
            logits.append(torch.softmax(llm.logits(PROMPTS[0]), -1))
            assert all(len(one.outputs[0].token_ids) == 12 for one in llm.generate(PROMPTS, GREEDY))
            loaded = llm.engine.loaded
            sizes_of.append(loaded.linear_bytes)
            found = [m for m in loaded.model.modules() if isinstance(m, SemiStructuredLinear)]
            assert bool(found) == (kernels == "semi_structured")
    assert float((logits[1] - logits[0]).abs().sum(-1).mean()) / 2 < 0.05
    assert 0.5 < sizes_of[1] / sizes_of[0] < 0.6
