"""Pictures of prompts, from what a user gives to what the engine takes. Free of torch."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from minivllm.errors import BadInput
from minivllm.extras.vision.options import VisionOptions, require_no_vision
from minivllm.models.load.messages import ImageParts
from minivllm.models.load.source import Source
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.models.registry import sees
from minivllm.models.vision.inputs import ProcessedImage, RequestInputs
from minivllm.models.vision.picture import PictureLimits, open_picture
from minivllm.models.vision.processor import ImageProcessor, PromptImages
from minivllm.models.vision.registry import image_processor
from minivllm.platform.untrusted import MIB, size

NO_IMAGES = "this model takes no images: use one that does, such as model=smolvlm_256m"


def limits(options: VisionOptions) -> PictureLimits:
    """How large a picture may be."""
    return PictureLimits(int(options.max_image_mb * MIB), int(options.max_megapixels * 1_000_000))


def fitting_processor(options: VisionOptions, source: Source) -> ImageProcessor | None:
    """The image processor of a model, by the model's files and the knobs; None for a model that
    takes no images.

    Raises:
        BadInput: a knob is set for a model that takes none; its image processor, or a setting over
            that, is wrong.
    """
    if sees(source.config["architectures"][0]):
        return image_processor(source.config, source.folder, options.processor or {})
    require_no_vision(options)
    return None


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

    def parts(self, trusted: bool = False) -> ImageParts | None:
        """What takes the images of messages; None where the model takes none."""
        if self.prompts is None:
            return None
        return ImageParts(self.prompts.processor.placeholder, trusted)

    def add(
        self, token_ids: list[int], parts: ImageParts | None
    ) -> tuple[list[int], RequestInputs | None]:
        """The prompt of a conversation with its images; see `insert`."""
        sources = [] if parts is None else parts.sources
        return self.insert(
            token_ids,
            [
                self._read(source, f"image {i}") if kind == "url" else source
                for i, (kind, source) in enumerate(sources, start=1)
            ],
        )

    def processed(self, url: str, what: str) -> ProcessedImage:
        """What the tower takes of the picture at a URL; `what` names it in errors.

        Raises:
            BadInput: the URL is none that is read, or the picture is broken or too large.
        """
        return self.require().processed(open_picture(self._read(url, what), self.limits, what))

    def _read(self, url: str, what: str) -> bytes | Path:
        """The bytes of a data: URI, or the path of a file that may be read.

        Raises:
            BadInput: it is neither.
        """
        if url.startswith("data:"):
            head, _, data = url.partition(",")
            if not head.endswith(";base64"):
                raise BadInput(f"{what}: a data: URI is base64, as data:image/png;base64,...")
            if len(data) // 4 * 3 > self.limits.most_bytes + 3:
                raise BadInput(
                    f"{what} has more than {size(self.limits.most_bytes)} (vision.max_image_mb)"
                )
            try:
                return base64.b64decode(data, validate=True)
            except ValueError as error:
                raise BadInput(f"{what}: its data: URI is no base64 ({error})") from None
        if not url.startswith("file://"):
            raise BadInput(
                f"{what}: only data: URIs and file:// paths below vision.folder are read; no URL "
                "is fetched"
            )
        if self.options.folder is None:
            raise BadInput(f"{what}: no file is read, as vision.folder names no folder")
        try:
            folder = Path(self.options.folder).expanduser().resolve()
            path = Path(unquote(url.removeprefix("file://"))).resolve()
        except (OSError, ValueError, RuntimeError):
            raise BadInput(f"{what}: its path is none") from None
        if not path.is_relative_to(folder):
            raise BadInput(f"{what}: only files below vision.folder are read")
        return path

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
        prompts = self.require()
        self.require_few(len(pictures))
        opened = [
            open_picture(one, self.limits, f"image {i}") for i, one in enumerate(pictures, start=1)
        ]
        return prompts.insert(token_ids, opened)

    def require(self) -> PromptImages:
        """What puts images into prompts. Raises BadInput where the model takes none."""
        if self.prompts is None:
            raise BadInput(NO_IMAGES)
        return self.prompts

    def require_few(self, count: int) -> None:
        """Raise BadInput where a prompt has too many images."""
        if count > self.options.max_images:
            raise BadInput(
                f"the prompt has {count} images, and vision.max_images={self.options.max_images}"
            )
