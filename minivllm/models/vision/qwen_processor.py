"""Image processing of Qwen2.5-VL and Qwen3-VL: a picture is resized to whole blocks of patches, and
its tokens have a position in height and width. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from minivllm.errors import BadInput
from minivllm.models.vision.inputs import ImageSpan, ProcessedImage
from minivllm.models.vision.processor import ImageProcessor
from minivllm.platform.values import Values

_MOST_RATIO = 200  # of the sides of a picture
_MOST_PIXELS = 1 << 28
_MOST_SIDE = 1 << 10  # of a patch


class QwenProcessor(ImageProcessor):
    """Patches as transformers' Qwen2VLImageProcessorPil makes them."""

    placeholder = "<|vision_start|><|image_pad|><|vision_end|>"
    patch_size = 14  # where config.json has none

    def __init__(self, config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        super().__init__(config, settings)
        values = Values(config, "config.json")
        self.image_token_id = values.integer("image_token_id", 151_655, low=0)
        self.begin = values.integer("vision_start_token_id", 151_652, low=0)
        self.end = values.integer("vision_end_token_id", 151_653, low=0)
        vision = values.section("vision_config")
        self.patch = self._same("patch_size", vision, "patch_size", self.patch_size)
        self.merge = self._same("merge_size", vision, "spatial_merge_size", 2)
        self.frames = self._same("temporal_patch_size", vision, "temporal_patch_size", 2)
        size = self.values.section("size")
        self.least = self._limit("min_pixels", size, "shortest_edge")
        self.most = self._limit("max_pixels", size, "longest_edge")
        if self.least > self.most:
            self.values.fail("size", f"has {self.least} as the least and {self.most} as the most")

    def _same(self, key: str, vision: Values, own_key: str, default: int) -> int:
        """A size that the tower has, too."""
        own = vision.integer(own_key, default, high=_MOST_SIDE)
        if self.values.integer(key, own, high=_MOST_SIDE) != own:
            self.values.fail(key, f"is not {own_key}={own} of config.json")
        return own

    def _limit(self, key: str, size: Values, key_in_size: str) -> int:
        """A limit of the pixels of a resized picture, in the older or the newer spelling."""
        default = self.defaults["size"][key_in_size]
        return self.values.integer(
            key, size.integer(key_in_size, default, high=_MOST_PIXELS), high=_MOST_PIXELS
        )

    @property
    def image_mark(self) -> tuple[int, ...]:
        return (self.begin, self.image_token_id, self.end)

    def reference_inputs(
        self, prompts: Sequence[Sequence[ProcessedImage]], token_ids: NDArray[np.int64]
    ) -> dict[str, NDArray[Any]]:
        """float32 [patches, values] of all images, int64 [images, 3] of their
        grids in time, height and width, and which tokens are theirs."""
        images = [image for one in prompts for image in one]
        patches = np.concatenate([image.pixels for image in images])
        values = np.stack([self.levels[c][patches[:, c]] for c in range(3)], 1)
        frames = np.repeat(values[:, :, None], self.frames, 2)
        return {
            "pixel_values": frames.reshape(len(frames), -1),
            "image_grid_thw": np.array([(1, *image.grid) for image in images], np.int64),
            "mm_token_type_ids": (token_ids == self.image_token_id).astype(np.int64),
        }

    @property
    def most_tokens(self) -> int:
        return max(1, self.most // (self.patch * self.merge) ** 2)

    def process(self, image: Image.Image) -> ProcessedImage:
        """The pixels are patches [patches, 3, side, side], those of a block one
        after another; the grid has the rows and columns of patches."""
        digest = self.digest(image)
        side, merge = self.patch, self.merge
        height, width = self._resized(image.height, image.width)
        if (width, height) != image.size:
            image = image.resize((width, height), self.resample)
        rows, columns = height // side, width // side
        blocks = np.asarray(image).reshape(
            rows // merge, merge, side, columns // merge, merge, side, 3
        )
        # Rows and columns of blocks, then of patches in a block; channels; rows and columns of a
        # patch.
        patches = blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, side, side)
        return ProcessedImage(digest, patches, rows * columns // merge**2, (rows, columns))

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width, pixels, after resizing: multiples of a block, with a product between
        the limits, and a ratio near the picture's.

        Raises:
            BadInput: one side is more than 200 times the other, or the picture is not resized and
                has no whole blocks.
        """
        block = self.patch * self.merge
        if not self.values.flag("do_resize", True):
            if height % block or width % block:
                raise BadInput(
                    f"do_resize=false: a picture of {width} x {height} pixels has no whole blocks "
                    f"of {block} pixels"
                )
            return height, width
        if max(height, width) > _MOST_RATIO * min(height, width):
            raise BadInput(
                f"a picture of {width} x {height} pixels is too narrow: its longer side may be "
                f"{_MOST_RATIO} times the shorter one at most"
            )
        rows, columns = round(height / block) * block, round(width / block) * block
        if rows * columns > self.most:
            shrink = math.sqrt(height * width / self.most)
            rows = max(block, math.floor(height / shrink / block) * block)
            columns = max(block, math.floor(width / shrink / block) * block)
        elif rows * columns < self.least:
            enlarge = math.sqrt(self.least / (height * width))
            rows = math.ceil(height * enlarge / block) * block
            columns = math.ceil(width * enlarge / block) * block
        return rows, columns

    def positions(
        self, num_tokens: int, spans: Sequence[ImageSpan], images: Sequence[ProcessedImage]
    ) -> tuple[NDArray[np.int64] | None, int]:
        """The tokens of an image have one position in time, and its rows and
        columns; the text after it goes on behind the larger of them.

        Raises:
            BadInput: there is text between the tokens of an image.
        """
        positions = np.empty((3, num_tokens), np.int64)
        begin = shift = 0
        for span in spans:
            image = images[span.image]
            if span.length != image.num_tokens:
                raise BadInput(f"image {span.image}: there are other tokens between its own")
            positions[:, begin : span.start] = np.arange(begin, span.start) + shift
            rows, columns = (count // self.merge for count in image.grid)
            place = np.indices((rows, columns)).reshape(2, -1)
            positions[0, span.start : span.end] = 0
            positions[1:, span.start : span.end] = place
            positions[:, span.start : span.end] += span.start + shift
            shift += max(rows, columns) - span.length
            begin = span.end
        positions[:, begin:] = np.arange(begin, num_tokens) + shift
        return positions, shift


class Qwen2_5_VLProcessor(QwenProcessor):
    """As the published checkpoints of Qwen2.5-VL have it."""

    defaults: ClassVar[Mapping[str, Any]] = {
        "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16384},
        "min_pixels": None,
        "max_pixels": None,
        "patch_size": None,
        "merge_size": None,
        "temporal_patch_size": None,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }


class Qwen3VLProcessor(QwenProcessor):
    """As the published checkpoints of Qwen3-VL have it."""

    patch_size = 16
    defaults: ClassVar[Mapping[str, Any]] = {
        **Qwen2_5_VLProcessor.defaults,
        "size": {"shortest_edge": 256 * 256, "longest_edge": 4096 * 4096},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
