"""Rotations by time, height and width beside transformers."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from minivllm.errors import BadInput
from minivllm.models.config import ModelConfig
from minivllm.models.mrope import MRotary
from minivllm.models.rope import Rotary
from tests.later import Later
from tests.reference import make_batch

qwen2, qwen3 = (
    Later(f"transformers.models.{name}.modeling_{name}") for name in ("qwen2_5_vl", "qwen3_vl")
)
SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
}
CLASSES: dict[str, Any] = {
    "Qwen2_5_VLForConditionalGeneration": lambda: (
        qwen2.Qwen2_5_VLTextConfig,
        qwen2.Qwen2_5_VLRotaryEmbedding,
    ),
    "Qwen3VLForConditionalGeneration": lambda: (
        qwen3.Qwen3VLTextConfig,
        qwen3.Qwen3VLTextRotaryEmbedding,
    ),
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
CPU = torch.device("cpu")


class Positions(NamedTuple):
    """What a step with images has."""

    positions: torch.Tensor


def config_of(architecture: str, **rope: Any) -> ModelConfig:
    """A small model with the rope."""
    parameters = {"rope_type": "default", "rope_theta": 5e4, "mrope_section": [6, 6, 4], **rope}
    return ModelConfig.from_dict(
        {**SIZES, "architectures": [architecture], "rope_parameters": parameters}
    )


@pytest.mark.parametrize("sections", [[6, 6, 4], [2, 7, 7], [16, 0, 0]])
@pytest.mark.parametrize("scaling", [{}, YARN], ids=["default", "yarn"])
@pytest.mark.parametrize("architecture", CLASSES)
def test_rotations_are_those_of_transformers(
    architecture: str, scaling: dict[str, Any], sections: list[int]
) -> None:
    config = config_of(architecture, mrope_section=sections, **scaling)
    make_config, make_rotary = CLASSES[architecture]()
    reference = make_rotary(make_config(**SIZES, rope_parameters=config.rope.parameters))
    if architecture.startswith("Qwen2"):
        reference.inv_freq = reference.inv_freq[:16]  # its heads are hidden_size / heads wide
        parameters = config.rope.parameters
        reference = make_rotary(
            make_config(**SIZES | {"hidden_size": 128}, rope_parameters=parameters)
        )
    positions = torch.randint(0, 64, (3, 9), generator=torch.Generator().manual_seed(0))
    wanted_cos, wanted_sin = reference(torch.zeros(1), positions[:, None])
    rotary = MRotary(config.rope, 32, 64, torch.float32, CPU)
    batch = make_batch([[0] * 9])._replace(inputs=Positions(positions))
    cos, sin = rotary(batch)
    torch.testing.assert_close(cos[:, 0], wanted_cos[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(sin[:, 0].abs(), wanted_sin[0].abs(), atol=1e-6, rtol=0)
    torch.testing.assert_close(sin[:, 0, 16:], wanted_sin[0, :, 16:], atol=1e-6, rtol=0)


@pytest.mark.parametrize("architecture", CLASSES)
def test_text_turns_as_without_images(architecture: str) -> None:
    rope = config_of(architecture).rope
    plain, ours = (cls(rope, 32, 64, torch.float32, CPU) for cls in (Rotary, MRotary))
    batch = make_batch([[0] * 30])
    same = batch.positions.expand(3, -1)
    for inputs in (None, Positions(same)):
        both = zip(ours(batch._replace(inputs=inputs)), plain(batch), strict=True)
        assert all(torch.equal(one, other) for one, other in both)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"mrope_section": [6, 6]}, "mrope_section=.* must have three numbers"),
        ({"mrope_section": [6, 6, 6]}, "must sum to the 16 pairs"),
        ({"mrope_section": "6"}, "mrope_section='6' must be a list"),
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type='dynamic' does not go with positions"),
    ],
)
def test_a_wrong_rope_is_named(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        config_of("Qwen3VLForConditionalGeneration", **rope)


def test_the_first_spelling_of_the_published_files_is_read() -> None:
    config = {**SIZES, "architectures": ["Qwen2_5_VLForConditionalGeneration"], "rope_theta": 5e4}
    old = config | {"rope_scaling": {"type": "mrope", "mrope_section": [6, 6, 4]}}
    assert ModelConfig.from_dict(old) == config_of("Qwen2_5_VLForConditionalGeneration")
    with pytest.raises(BadInput, match="type='mrope' is not supported"):
        ModelConfig.from_dict(old | {"architectures": ["Qwen2ForCausalLM"]})
