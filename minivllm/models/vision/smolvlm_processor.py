"""Image processing of SmolVLM, SmolVLM2 and Idefics3: a picture is cut into square tiles, which the
whole picture in one tile follows. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from minivllm.errors import BadInput
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.models.vision.inputs import ProcessedImage
from minivllm.models.vision.processor import ImageProcessor
from minivllm.platform.values import Values

LARGEST_SIDE = 4096  # of a picture after its first resizing, as in transformers
MARK, GLOBAL_MARK = "<fake_token_around_image>", "<global-img>"


def tile_tokens(config: Mapping[str, Any], side: int) -> int:
    """Rows of the embeddings of a tile of `side` pixels.

    Raises:
        BadInput: the side is no multiple of what the pixel shuffle puts together.
    """
    values = Values(config, "config.json")
    patch = values.section("vision_config").integer("patch_size", 32)
    step = patch * values.integer("scale_factor", 2)
    if side % step:
        raise BadInput(
            f"preprocessor_config.json: max_image_size={side} must be a multiple of {step}, "
            "patch_size times scale_factor"
        )
    return (side // step) ** 2


def _even_below(longest: int, ratio: float) -> int:
    """The other side of a picture whose longest side was resized, rounded up to an even number."""
    side = int(longest / ratio)
    return side + side % 2


class SmolVLMProcessor(ImageProcessor):
    """Tiles as transformers' SmolVLMImageProcessorPil makes them: the longest side is resized to
    `size`, both to multiples of `max_image_size`, which is the side of a tile. Of what is no larger
    than a tile only that one remains."""

    placeholder = "<image>"
    defaults: ClassVar[Mapping[str, Any]] = {
        "resample": int(Image.Resampling.LANCZOS),
        "size": None,
        "max_image_size": None,
        "do_image_splitting": True,
        "do_pad": True,
    }

    def __init__(self, config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        super().__init__(config, settings)
        values = Values(config, "config.json")
        self.image_token_id = values.integer("image_token_id", 128_257, low=0)
        trained = values.section("vision_config").integer("image_size", 224)
        self.side = self.values.section("max_image_size").integer(
            "longest_edge", trained, high=LARGEST_SIDE
        )
        size = self.values.section("size")
        self.longest = size.integer("longest_edge", None, high=1 << 16)
        self.fixed = size.integer("height", None), size.integer("width", None)
        if self.longest is None and None in self.fixed:
            self.longest = 4 * self.side
        if not self.values.flag("do_resize", True):
            self.values.fail("do_resize", "is not supported: nothing would bound the tiles")
        self.splits = self.values.flag("do_image_splitting", True)
        self.tile_tokens = tile_tokens(config, self.side)
        self._expansions: dict[tuple[int, ...], list[int]] = {}  # by grid

    @property
    def most_tokens(self) -> int:
        """Rows of the largest image: a square picture has the most tiles."""
        longest = self.longest or max(side or 0 for side in self.fixed)
        across = math.ceil(min(longest, LARGEST_SIDE) / self.side)
        return self.tile_tokens * (across**2 + 1 if across > 1 and self.splits else 1)

    def process(self, image: Image.Image) -> ProcessedImage:
        """An image whose pixels are tiles [tiles, 3, side, side]."""
        digest = self.digest(image)
        image = image.resize(self._first_size(*image.size), self.resample)
        if self.splits:
            image = image.resize(self._whole_tiles(*image.size), self.resample)
        else:
            image = image.resize((self.side, self.side), self.resample)
        side, (width, height) = self.side, image.size
        rows, columns = height // side, width // side
        tiles = [image]
        if rows * columns > 1:
            corners = [(x * side, y * side) for y in range(rows) for x in range(columns)]
            tiles = [image.crop((x, y, x + side, y + side)) for x, y in corners]
            tiles.append(image.resize((side, side), self.resample))
        else:
            rows = columns = 0
        pixels = np.stack([np.asarray(tile).transpose(2, 0, 1) for tile in tiles])
        return ProcessedImage(digest, pixels, len(tiles) * self.tile_tokens, (rows, columns))

    def _first_size(self, width: int, height: int) -> tuple[int, int]:
        """Width and height of a picture whose longest side is `longest`."""
        if self.longest is None:
            fixed_height, fixed_width = self.fixed
            assert fixed_height is not None and fixed_width is not None
            return fixed_width, fixed_height
        ratio = width / height
        if width >= height:
            width, height = self.longest, _even_below(self.longest, ratio)
        else:
            # Not `_even_below` of 1 / ratio, which would round in another way.
            width, height = int(self.longest * ratio), self.longest
            width += width % 2
        width, height = max(width, 1), max(height, 1)
        ratio = width / height
        if width >= height and width > LARGEST_SIDE:
            width, height = LARGEST_SIDE, int(LARGEST_SIDE / ratio)
        elif height > width and height > LARGEST_SIDE:
            width, height = int(LARGEST_SIDE * ratio), LARGEST_SIDE
        return max(width, 1), max(height, 1)

    def _whole_tiles(self, width: int, height: int) -> tuple[int, int]:
        """Width and height in whole tiles."""
        side, ratio = self.side, width / height
        if width >= height:
            width = math.ceil(width / side) * side
            height = math.ceil(int(width / ratio) / side) * side
        else:
            height = math.ceil(height / side) * side
            width = math.ceil(int(height * ratio) / side) * side
        return width, height

    def reference_inputs(
        self, prompts: Sequence[Sequence[ProcessedImage]], token_ids: NDArray[np.int64]
    ) -> dict[str, NDArray[Any]]:
        """float32 [prompts, tiles, 3, side, side], zeros where a prompt has
        fewer tiles than another."""
        most = max(sum(len(image.pixels) for image in images) for images in prompts)
        values = np.zeros((len(prompts), most, 3, self.side, self.side), np.float32)
        for row, images in zip(values, prompts, strict=True):
            tiles = [tile for image in images for tile in image.pixels]
            for place, tile in zip(row, tiles, strict=False):
                for channel in range(3):
                    place[channel] = self.levels[channel][tile[channel]]
        return {"pixel_values": values}

    def expansion(self, image: ProcessedImage, tokenizer: Tokenizer | None) -> Sequence[int]:
        """Without a tokenizer there are no marks around the tiles, since their
        ids are not known."""
        if tokenizer is None:
            return super().expansion(image, None)
        if image.grid not in self._expansions:
            self._expansions[image.grid] = self._expansion(image.grid, tokenizer)
        return self._expansions[image.grid]

    def _expansion(self, grid: tuple[int, ...], tokenizer: Tokenizer) -> list[int]:
        """The tokens of an image of so many rows and columns of tiles."""
        tile = self.placeholder * self.tile_tokens
        rows, columns = grid
        text = "".join(
            "".join(f"{MARK}<row_{y + 1}_col_{x + 1}>{tile}" for x in range(columns)) + "\n"
            for y in range(rows)
        )
        text += ("\n" if rows else "") + f"{MARK}{GLOBAL_MARK}{tile}{MARK}"
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        if token_ids.count(self.image_token_id) != (rows * columns + 1) * self.tile_tokens:
            raise BadInput(
                f"the tokenizer does not know {self.placeholder} as token {self.image_token_id} of "
                "config.json: it is not this model's"
            )
        return token_ids
