"""Tiles and prompts beside transformers' image processor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from minivllm.errors import BadInput
from minivllm.models.vision.smolvlm_processor import SmolVLMProcessor
from tests.seeing import IMAGE_TOKEN, PROCESSOR, VISION, picture, smolvlm_processor

CONFIG = {"image_token_id": IMAGE_TOKEN, "scale_factor": 2, "vision_config": VISION}
SIZES = [(50, 30), (17, 33), (32, 32), (31, 32), (1, 40), (400, 3), (96, 97), (333, 200), (5, 5)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"do_image_splitting": False},
        {"size": {"longest_edge": 200}, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 1]},
        {"resample": 3, "do_normalize": False},
        {"size": {"height": 70, "width": 33}},
        {"do_rescale": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_tiles_are_those_of_transformers_to_the_bit(
    size: tuple[int, int], changes: dict[str, Any]
) -> None:
    wanted = smolvlm_processor(**changes)(images=[[picture(*size)]], return_tensors="np")
    processor = SmolVLMProcessor(CONFIG, {**PROCESSOR, **changes})
    mine = processor.process(picture(*size))
    channels = [processor.levels[c][mine.pixels[:, c]] for c in range(3)]
    assert np.array_equal(np.stack(channels, 1), wanted["pixel_values"][0])
    assert mine.grid == (wanted["rows"][0][0], wanted["cols"][0][0])
    assert mine.num_tokens == 16 * len(mine.pixels) <= processor.most_tokens


def test_a_digest_is_of_pixels_size_and_processing() -> None:
    processor = SmolVLMProcessor(CONFIG, PROCESSOR)
    one = processor.digest(picture(20, 30))
    assert one == SmolVLMProcessor(CONFIG, PROCESSOR).digest(picture(20, 30)) and len(one) == 16
    changed = picture(20, 30)
    changed.putpixel((3, 4), (1, 2, 3))
    others = [
        processor.digest(changed),
        processor.digest(picture(20, 30).transpose(Image.Transpose.ROTATE_90)),
        SmolVLMProcessor(CONFIG, {**PROCESSOR, "resample": 3}).digest(picture(20, 30)),
    ]
    assert len({one, *others}) == 4


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (CONFIG, {"max_image_size": {"longest_edge": 30}}, "max_image_size=30 must be a multiple"),
        (CONFIG, {"image_mean": [0.5]}, "must be three numbers each"),
        (CONFIG, {"resample": 9}, "resample=9 must be a whole number from 0 to 5"),
        (CONFIG, {"do_resize": False}, "do_resize=False is not supported"),
        (CONFIG, {"size": 3}, "size=3 must be an object"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_setting_is_named(config: Any, settings: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        SmolVLMProcessor(config, {**PROCESSOR, **settings})
