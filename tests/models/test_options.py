"""The model option files hold architectures that build, with the published sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from minivllm.models.config import ModelConfig
from minivllm.models.layers import HeadNorm, Linear
from minivllm.models.registry import model_class

CONF = Path(__file__).parents[2] / "conf" / "model"
PARAMETERS = {
    "qwen3": 596_049_920,
    "qwen3_8b": 8_190_735_360,
    "llama3_2_1b": 1_235_814_400,
    "tinyllama": 1_100_048_384,
}


@pytest.mark.parametrize("option", PARAMETERS)
def test_an_architecture_has_the_published_number_of_parameters(option: str) -> None:
    node: dict[str, Any] = yaml.safe_load((CONF / f"{option}.yaml").read_text())
    config = ModelConfig.from_dict(node["architecture"], option)
    with torch.device("meta"):
        model = model_class(config.architecture)(config, torch.bfloat16)
    linears = [m for m in model.modules() if isinstance(m, Linear)]
    count = sum(sum(linear.parts.values()) * (linear.in_features + linear.has_bias) for linear in linears)
    count -= config.vocab_size * config.hidden_size * config.tie_word_embeddings
    norms = [m for m in model.modules() if isinstance(m, HeadNorm)]
    repeated = sum((sum(norm.parts.values()) - len(norm.parts)) * config.head_dim for norm in norms)
    count += sum(p.numel() for p in model.parameters()) - repeated
    assert count == PARAMETERS[option]
    assert node["max_model_len"] is None or node["max_model_len"] <= config.max_position_embeddings
