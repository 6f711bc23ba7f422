"""Towers of the Qwen families beside transformers, and what they cost."""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as settings_of
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from minivllm.errors import BadInput
from minivllm.kernels.device import BuildContext
from minivllm.models.load.loading import load_model
from minivllm.models.options import ModelOptions
from minivllm.models.vision import qwen_tower
from minivllm.models.vision.inputs import ProcessedImage
from minivllm.models.vision.qwen2_5_vl import Qwen2_5_VLTower
from minivllm.models.vision.qwen3_vl import Qwen3VLTower
from minivllm.models.vision.qwen_processor import Qwen3VLProcessor
from minivllm.models.vision.qwen_tower import QwenTower
from minivllm.quant.plain import Plain
from tests.qwen_vl import FAMILIES, SIZES, image_processor, make_checkpoint, pictures, settings

CPU = torch.device("cpu")


@cache
def processor() -> Qwen3VLProcessor:
    return Qwen3VLProcessor({"vision_config": {"patch_size": 4}}, settings())


@cache
def levels() -> Tensor:
    return torch.from_numpy(processor().levels)


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
    rows = tower.encode([processor().process(image) for image in images], levels())
    assert [len(one) for one in rows] == [processor().process(one).num_tokens for one in images]
    assert tower.width == whole.shape[1] and whole.std() > 0.5
    torch.testing.assert_close(torch.cat(rows), whole, atol=1e-4, rtol=0)


def test_an_image_has_the_same_embeddings_alone_and_in_any_company(
    towers: tuple[Any, QwenTower], monkeypatch: pytest.MonkeyPatch
) -> None:
    tower, images = towers[1], [processor().process(image) for image in pictures(*SIZES)]
    together = tower.encode(images, levels())
    alone = [tower.encode([image], levels())[0] for image in images]
    monkeypatch.setattr(qwen_tower, "MOST_PATCHES", 60)
    in_groups = tower.encode(images, levels())
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
        done = processor().process(image)
        with FlopCounterMode(display=False) as counter:
            towers[1].encode([done], levels())
        assert towers[1].flops(done) == counter.get_total_flops()


def test_memory_is_that_of_the_largest_picture(towers: tuple[Any, QwenTower]) -> None:
    tower = towers[1]
    block = tower.sizes.merge**2
    usual = tower.working_bytes(qwen_tower.MOST_PATCHES // block)
    assert tower.working_bytes(1) == usual
    assert tower.working_bytes(3 * qwen_tower.MOST_PATCHES // block) == 3 * usual


@settings_of(max_examples=12)
@given(st.data())
def test_memory_is_what_a_tower_takes_at_its_peak(data: st.DataObject) -> None:
    """The bytes that torch says it has taken, minus what it has given back."""
    family = data.draw(st.sampled_from([*FAMILIES]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    heads = data.draw(st.sampled_from([2, 4]))
    sizes = {
        "hidden_size": heads * data.draw(st.sampled_from([16, 32, 40])),
        "num_heads": heads,
        "intermediate_size": data.draw(st.integers(40, 500)),
    }
    tower = random_tower(family, dtype, sizes)
    grid = tuple(2 * data.draw(st.integers(8, 14)) for _ in range(2))
    patches = grid[0] * grid[1]
    pixels = np.zeros((patches, 3, 4, 4), np.uint8)
    image = ProcessedImage(b"", pixels, patches // 4, grid)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        (rows,) = tower.encode([image], levels())
    measured = peak_bytes(watched) - rows.nbytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qwen_tower, "MOST_PATCHES", 1)
        counted = tower.working_bytes(image.num_tokens)
    assert measured <= counted <= 2.5 * measured


def random_tower(family: str, dtype: torch.dtype, sizes: dict[str, int]) -> QwenTower:
    """A tower of a small model with other sizes."""
    about = FAMILIES[family]
    name = {"qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[family]
    config = {
        "architectures": [f"{name}ForConditionalGeneration"],
        **about,
        "vision_config": about["vision_config"] | sizes,
    }
    tower: QwenTower = {"qwen2_5_vl": Qwen2_5_VLTower, "qwen3_vl": Qwen3VLTower}[family](config)
    return tower.to(dtype)


def peak_bytes(watched: profile) -> int:
    """Most bytes at once of all that was taken while a profiler watched."""
    result = watched.profiler
    assert result is not None and result.kineto_results is not None
    events = [one for one in result.kineto_results.events() if one.name() == "[memory]"]
    events.sort(key=lambda one: one.start_ns())
    return max(accumulate(one.nbytes() for one in events))


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
