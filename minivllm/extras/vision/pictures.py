"""Pictures of prompts, from what a user gives to what the engine takes. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minivllm.errors import BadInput
from minivllm.extras.vision.options import VisionOptions
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.models.vision.inputs import RequestInputs
from minivllm.models.vision.picture import PictureLimits, open_picture
from minivllm.models.vision.processor import ImageProcessor, PromptImages
from minivllm.platform.untrusted import MIB

NO_IMAGES = "this model takes no images: use one that does, such as model=smolvlm_256m"


def limits(options: VisionOptions) -> PictureLimits:
    """How large a picture may be."""
    return PictureLimits(int(options.max_image_mb * MIB), int(options.max_megapixels * 1_000_000))


class Pictures:
    """Opens pictures and puts them into prompts.

    Args:
        processor: of the model; None: it takes no images.
        tokenizer: of the model; None: prompts are token ids.
        options: the knobs of `vision`.
    """

    def __init__(
        self,
        processor: ImageProcessor | None,
        tokenizer: Tokenizer | None,
        options: VisionOptions,
    ) -> None:
        self.options, self.limits = options, limits(options)
        cache_bytes = int(options.processor_cache_mb * MIB)
        self.prompts: PromptImages | None = None
        if processor is not None:
            self.prompts = PromptImages(processor, tokenizer, cache_bytes)

    def insert(
        self, token_ids: list[int], pictures: Sequence[Any]
    ) -> tuple[list[int], RequestInputs | None]:
        """A prompt with its images.

        Args:
            token_ids: see `PromptImages.insert`.
            pictures: as `open_picture` takes them.

        Raises:
            BadInput: the model takes no images, there are too many, one is broken or too large, or
                placeholders and images do not match.
        """
        if not pictures:
            return token_ids, None
        if self.prompts is None:
            raise BadInput(NO_IMAGES)
        if len(pictures) > self.options.max_images:
            raise BadInput(
                f"the prompt has {len(pictures)} images, and vision.max_images="
                f"{self.options.max_images}"
            )
        opened = [
            open_picture(one, self.limits, f"image {i}") for i, one in enumerate(pictures, start=1)
        ]
        return self.prompts.insert(token_ids, opened)
