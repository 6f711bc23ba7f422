"""Towers of the Qwen families beside transformers, and what they cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from minivllm.errors import BadInput
from minivllm.kernels.context import BuildContext
from minivllm.models.load.loading import load_model
from minivllm.models.options import ModelOptions
from minivllm.models.vision import qwen_tower
from minivllm.models.vision.qwen2_5_vl import Qwen2_5_VLTower
from minivllm.models.vision.qwen3_vl import Qwen3VLTower
from minivllm.models.vision.qwen_processor import Qwen3VLProcessor
from minivllm.models.vision.qwen_tower import QwenTower
from minivllm.quant.plain import Plain
from tests.qwen_vl import FAMILIES, SIZES, image_processor, make_checkpoint, pictures, settings

CPU = torch.device("cpu")
PROCESSOR = Qwen3VLProcessor({"vision_config": {"patch_size": 4}}, settings())
LEVELS = torch.from_numpy(PROCESSOR.levels)


@pytest.fixture(scope="module", params=FAMILIES)
def towers(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, QwenTower]:
    """The tower of transformers, and the same one here."""
    folder: Path = tmp_path_factory.mktemp("tower")
    reference = make_checkpoint(folder, request.param)
    loaded = load_model(
        ModelOptions(str(folder)), quant=Plain("float32"), context=BuildContext(CPU)
    )
    assert loaded.vision is not None and isinstance(loaded.vision.tower, QwenTower)
    return reference.model.visual, loaded.vision.tower


@torch.no_grad()
def test_embeddings_and_deep_features_match_transformers(towers: tuple[Any, QwenTower]) -> None:
    reference, tower = towers
    images = pictures(*SIZES, SIZES[0])
    given = image_processor()(images, return_tensors="pt")
    wanted = reference(given["pixel_values"], grid_thw=given["image_grid_thw"])
    deep = getattr(wanted, "deepstack_features", None) or []
    whole = torch.cat([wanted.pooler_output, *deep], -1)
    rows = tower.encode([PROCESSOR.process(image) for image in images], LEVELS)
    assert [len(one) for one in rows] == [PROCESSOR.process(one).num_tokens for one in images]
    assert tower.width == whole.shape[1] and whole.std() > 0.5
    torch.testing.assert_close(torch.cat(rows), whole, atol=1e-4, rtol=0)


def test_an_image_has_the_same_embeddings_alone_and_in_any_company(
    towers: tuple[Any, QwenTower], monkeypatch: pytest.MonkeyPatch
) -> None:
    tower, images = towers[1], [PROCESSOR.process(image) for image in pictures(*SIZES)]
    together = tower.encode(images, LEVELS)
    alone = [tower.encode([image], LEVELS)[0] for image in images]
    monkeypatch.setattr(qwen_tower, "MOST_PATCHES", 60)
    in_groups = tower.encode(images, LEVELS)
    for rows in zip(together, alone, in_groups, strict=True):
        for other in rows[1:]:
            torch.testing.assert_close(other, rows[0], atol=1e-5, rtol=0)


def test_operations_are_those_that_run(
    towers: tuple[Any, QwenTower], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch counts no operations of its attention on a CPU, so here it is two products."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    for image in pictures(*SIZES):
        done = PROCESSOR.process(image)
        with FlopCounterMode(display=False) as counter:
            towers[1].encode([done], LEVELS)
        assert towers[1].flops(done) == counter.get_total_flops()


def test_memory_grows_with_the_sizes(towers: tuple[Any, QwenTower]) -> None:
    tower = towers[1]
    sizes = tower.sizes
    assert tower.working_bytes > 4 * qwen_tower.MOST_PATCHES * (sizes.hidden + sizes.inner)


CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    **FAMILIES["qwen3_vl"],
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, "num_heads=3 must divide hidden_size=32"),
        ({"num_heads": 16}, "num_heads=16 must divide hidden_size=32 into multiples of 4"),
        ({"out_hidden_size": 64}, "out_hidden_size=64 is not the text model's hidden_size=48"),
        ({"hidden_act": "relu"}, "hidden_act='relu' is not supported"),
        ({"in_channels": 4}, "in_channels=4 is not supported, only 3"),
        ({"depth": 0}, "depth=0 must be a whole number"),
        ({"num_position_embeddings": 48}, "num_position_embeddings=48 must be a square"),
        ({"deepstack_visual_indexes": [2, 0]}, "deepstack_visual_indexes=.* must rise"),
        ({"deepstack_visual_indexes": [4]}, "deepstack_visual_indexes=.* whole numbers from 0 to"),
        ({"deepstack_visual_indexes": [0, 1, 2, 3]}, "needs more layers than the text model's 4"),
    ],
)
def test_a_wrong_size_is_named(change: dict[str, Any], message: str) -> None:
    config = {**CONFIG, "vision_config": CONFIG["vision_config"] | change}
    with pytest.raises(BadInput, match=message):
        Qwen3VLTower(config)


def test_a_window_smaller_than_a_block_is_an_error() -> None:
    family = FAMILIES["qwen2_5_vl"]
    config = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        **family,
        "vision_config": family["vision_config"] | {"window_size": 7},
    }
    with pytest.raises(BadInput, match="window_size=7 is less than a block, which has 8 pixels"):
        Qwen2_5_VLTower(config)
