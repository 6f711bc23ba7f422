"""Pictures of clients, decoded and processed in child processes: one that ends a child, or takes it
too long, is an error of the client that sent it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from minivllm.errors import BadInput
from minivllm.extras.vision.options import VisionOptions
from minivllm.extras.vision.pictures import Pictures
from minivllm.models.load.messages import ImageParts
from minivllm.models.vision.inputs import ProcessedImage, RequestInputs
from minivllm.models.vision.processor import ImageProcessor
from minivllm.platform.processes.mortal import LONGEST, packed
from minivllm.serving.children.child_turns import ChildTurns, Work
from minivllm.serving.errors import ApiError

PICTURES = Work("minivllm.serving.children.picture_child", "image", 20.0, 1 << 20)
LONGEST_PIXEL = 8  # bytes of an answer: three in base64, twice where a family has two frames


class Settings(NamedTuple):
    """What a child decodes and processes pictures with."""

    processor: ImageProcessor
    options: VisionOptions


class PictureDecoder:
    """Puts the images of conversations into prompts, which children decode and process in turns.

    Args:
        pictures: of the model, which takes images.
    """

    def __init__(self, pictures: Pictures) -> None:
        self._pictures, self._prompts = pictures, pictures.require()
        # Processed images are kept here and not in a child, which may end.
        settings = Settings(
            self._prompts.processor, replace(pictures.options, processor_cache_mb=0.0)
        )
        longest = LONGEST + LONGEST_PIXEL * pictures.limits.most_pixels
        self.turns = ChildTurns(PICTURES, settings, longest)

    def parts(self) -> ImageParts:
        """What takes the images of a client's messages."""
        return ImageParts(self._prompts.processor.placeholder)

    async def add(
        self, token_ids: list[int], parts: ImageParts, client: str
    ) -> tuple[list[int], RequestInputs | None]:
        """The prompt of a conversation with its images; see `PromptImages.with_processed`.

        Args:
            token_ids: of the conversation.
            parts: its images.
            client: whose turn it is.

        Raises:
            ApiError: there are too many, or one is broken, too large or ended a child; placeholders
                and images do not match.
        """
        if not parts.sources:
            return token_ids, None
        try:
            self._pictures.require_few(len(parts.sources))
            done = [
                await self._processed(url, f"image {i}", client)
                for i, (_, url) in enumerate(parts.sources, start=1)
            ]
            return self._prompts.with_processed(token_ids, tuple(done))
        except BadInput as error:
            raise ApiError.of(error, "messages") from None

    async def _processed(self, url: str, what: str, client: str) -> ProcessedImage:
        """What the tower takes of a picture, which may be kept from the last time."""
        digest = await asyncio.to_thread(_digest, url)
        if (kept := self._prompts.kept(digest)) is not None:
            return kept
        question = await asyncio.to_thread(packed, (url, what))
        answer = await self.turns.answer(question, client, "messages")
        done = await asyncio.to_thread(_image, answer)
        if url.startswith("data:"):  # a file may change
            self._prompts.keep(digest, done)
        return done


def _digest(url: str) -> bytes:
    return hashlib.sha256(url.encode("utf-8", "surrogatepass")).digest()


def _image(answer: dict[str, Any]) -> ProcessedImage:
    """The image in a child's answer."""
    pixels = np.frombuffer(base64.b64decode(answer["pixels"]), np.uint8)
    shape, grid = answer["shape"], tuple(answer["grid"])
    digest = bytes.fromhex(answer["digest"])
    return ProcessedImage(digest, pixels.reshape(shape), answer["num_tokens"], grid)
