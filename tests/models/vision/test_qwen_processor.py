"""Patches and positions of the Qwen families beside transformers."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from minivllm.errors import BadInput
from minivllm.models.vision.processor import PromptImages
from minivllm.models.vision.qwen_processor import (
    Qwen2_5_VLProcessor,
    Qwen3VLProcessor,
    QwenProcessor,
)
from tests.qwen_vl import (
    SIZES,
    image_processor,
    make_checkpoint,
    model_inputs,
    picture,
    prompt,
    settings,
)

PATCH_14 = {"image_token_id": 120, "vision_config": {"patch_size": 14}}
PATCH_16 = {"image_token_id": 120, "vision_config": {"patch_size": 16}}
PATCH_4 = {"image_token_id": 120, "vision_config": {"patch_size": 4}}


def pixels(processor: QwenProcessor, image: Image.Image) -> Any:
    """The normalised patches, as transformers lays them out, and their grid."""
    done = processor.process(image)
    assert done.pixels.dtype == np.uint8
    channels = np.stack([processor.levels[c][done.pixels[:, c]] for c in range(3)], 1)
    frames = np.repeat(channels[:, :, None], 2, 2)
    return frames.reshape(len(frames), -1), done


@pytest.mark.parametrize("size", [*SIZES, (1, 200), (1000, 700), (56, 56), (84, 28), (3000, 40)])
@pytest.mark.parametrize(
    ("cls", "config", "given"),
    [
        (Qwen2_5_VLProcessor, PATCH_14, {}),
        (Qwen2_5_VLProcessor, PATCH_14, {"min_pixels": 1000, "max_pixels": 80_000}),
        (Qwen3VLProcessor, PATCH_16, {}),
        (Qwen3VLProcessor, PATCH_16, {"size": {"shortest_edge": 4096, "longest_edge": 70_000}}),
        (Qwen3VLProcessor, PATCH_16, {"image_mean": [0.1, 0.2, 0.3], "resample": 2}),
    ],
)
def test_patches_equal_those_of_transformers_to_the_pixel(
    cls: type[QwenProcessor], config: Any, given: dict[str, Any], size: tuple[int, int]
) -> None:
    side = config["vision_config"]["patch_size"]
    # transformers writes into what it is given.
    published = deepcopy({**cls.defaults, **given, "patch_size": side})
    theirs = image_processor(**{k: v for k, v in published.items() if v is not None})
    image = picture(*size)
    wanted = theirs([image], return_tensors="np")
    patches, done = pixels(cls(config, given), image)
    assert np.array_equal(patches, wanted["pixel_values"])
    assert [[1, *done.grid]] == wanted["image_grid_thw"].tolist()
    assert done.num_tokens == theirs.get_number_of_image_patches(*size[::-1]) // 4


def test_the_largest_picture_has_the_most_tokens() -> None:
    processor = Qwen3VLProcessor(PATCH_4, {"size": {"longest_edge": 2048, "shortest_edge": 64}})
    assert processor.most_tokens == 32
    counts = {processor.process(picture(*size)).num_tokens for size in [(256, 128), (500, 500)]}
    assert max(counts) == 32 and counts <= {*range(1, 33)}


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        (PATCH_14, {"patch_size": 16}, r"patch_size=16 is not patch_size=14 of config\.json"),
        (PATCH_14, {"merge_size": 4}, "merge_size=4 is not spatial_merge_size=2"),
        (PATCH_14, {"temporal_patch_size": 1}, "temporal_patch_size=1 is not temporal_patch_size"),
        (PATCH_14, {"max_pixels": 100}, "3136 as the least and 100 as the most"),
        (PATCH_14, {"min_pixels": "x"}, "min_pixels='x' must be a whole number"),
        (PATCH_14, {"size": {"longest_edge": 0}}, r"size\.longest_edge=0 must be a whole number"),
        ({"vision_config": {"patch_size": 0}}, {}, r"vision_config\.patch_size=0 must be"),
    ],
)
def test_a_wrong_setting_is_named(config: Any, given: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Qwen2_5_VLProcessor(config, given)


def test_a_picture_too_narrow_is_an_error() -> None:
    processor = Qwen2_5_VLProcessor(PATCH_14, {})
    assert processor.process(picture(400, 2)).num_tokens
    with pytest.raises(BadInput, match="402 x 2 pixels is too narrow"):
        processor.process(picture(402, 2))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_are_those_of_transformers(family: str, tmp_path: Any) -> None:
    model = make_checkpoint(tmp_path, family)
    processor = Qwen3VLProcessor(PATCH_4, settings())
    images = [picture(*size) for size in SIZES]
    for count, text in ((0, [5, 6]), (1, [5, [], 6, 7]), (5, [[], 5, [], 6, [7, 8, 9], []])):
        del text[count + 1 :]
        token_ids, inputs = PromptImages(processor, None).insert(prompt(*text), images[:count])
        if not count:
            positions, shift = processor.positions(len(token_ids), (), ())
        else:
            positions, shift = inputs.positions, inputs.shift
            given = model_inputs(token_ids, images[:count])
            wanted, delta = model.model.get_rope_index(
                given["input_ids"], given["mm_token_type_ids"], given["image_grid_thw"]
            )
            assert torch.equal(torch.from_numpy(positions), wanted[:, 0])
            assert shift == int(delta) < 0
        assert positions is not None and (positions[:, 0] == 0).all()


def test_text_between_the_tokens_of_an_image_is_an_error() -> None:
    processor = Qwen3VLProcessor(PATCH_4, settings())
    insert = PromptImages(processor, None).insert
    token_ids, _ = insert(prompt(5, 6), [picture(30, 30)])
    middle = len(token_ids) // 2
    with pytest.raises(BadInput, match="there are other tokens between its own"):
        insert([*token_ids[:middle], 9, *token_ids[middle:]], [picture(30, 30)])
