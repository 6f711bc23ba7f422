"""The model option files hold architectures that build, with the published sizes and the
checkpoint's names."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from minivllm.models.config import ModelConfig
from minivllm.models.load.filling import expected_shapes
from minivllm.models.load.names import StoredTensor, with_model_names
from minivllm.models.registry import model_class
from minivllm.models.vision.registry import vision_tower

CONF = Path(__file__).parents[2] / "conf" / "model"
PARAMETERS = {
    "gemma2_2b": 2_614_341_888,
    "gemma3_1b": 999_885_952,
    "gemma_2b": 2_506_172_416,
    "llama2_7b": 6_738_415_616,
    "llama3_1_8b": 8_030_261_248,
    "llama3_2_1b": 1_235_814_400,
    "mistral_7b": 7_241_732_096,
    "mixtral_8x7b": 46_702_792_704,
    "phi3_mini": 3_821_079_552,
    "phi4_mini": 3_836_021_760,
    "qwen2_5_0_5b": 494_032_768,
    "qwen2_5_7b": 7_615_616_512,
    "qwen2_5_vl_3b": 3_754_622_976,
    "qwen3": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_vl_2b": 2_127_532_032,
    "smollm2": 134_515_008,
    "smolvlm_256m": 256_484_928,
    "tinyllama": 1_100_048_384,
}
each_option = pytest.mark.parametrize("option", PARAMETERS)


def read(option: str) -> dict[str, Any]:
    node: dict[str, Any] = yaml.safe_load((CONF / f"{option}.yaml").read_text())
    return node


def tensors(architecture: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """What the loader would look for in a checkpoint."""
    config = ModelConfig.from_dict(architecture)
    with torch.device("meta"):
        text = expected_shapes(model_class(config.architecture)(config, torch.bfloat16))
        tower = vision_tower(architecture)
    return text if tower is None else text | tower.shapes


def test_every_option_with_an_architecture_is_here() -> None:
    named = {file.stem for file in CONF.glob("*.yaml") if "architecture" in read(file.stem)}
    assert named == set(PARAMETERS)


@each_option
def test_an_architecture_has_the_published_number_of_parameters(option: str) -> None:
    node = read(option)
    assert sum(map(math.prod, tensors(node["architecture"]).values())) == PARAMETERS[option]
    limit = ModelConfig.from_dict(node["architecture"]).max_position_embeddings
    assert node.get("max_model_len", limit) <= limit


@each_option
def test_the_tensors_are_those_that_transformers_saves(option: str) -> None:
    import transformers
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.initialization import no_init_weights

    architecture = read(option)["architecture"]
    config = getattr(transformers, architecture["architectures"][0]).config_class.from_dict(
        architecture
    )
    with torch.device("meta"), no_init_weights():
        model = getattr(transformers, architecture["architectures"][0])(config)
    # experts are fused in memory, not in files
    saved = revert_weight_conversion(model, model.state_dict())
    if config.tie_word_embeddings:
        saved.pop("lm_head.weight", None)
    stored = {
        name: StoredTensor(Path(), name, "BF16", tuple(value.shape), 0, 2 * value.numel())
        for name, value in saved.items()
    }
    found = {name: tensor.shape for name, tensor in with_model_names(stored).items()}
    assert found == tensors(architecture)
