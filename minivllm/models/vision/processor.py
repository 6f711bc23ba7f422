"""What an image processor is: a picture becomes pixels for the tower, and tokens of a prompt. Free
of torch."""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from minivllm.errors import BadInput, nearest
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.models.vision.inputs import DIGEST_BYTES, ImageSpan, ProcessedImage, RequestInputs
from minivllm.platform.values import Values

_SCALE = 1 / 255  # of the pixels of 8 bits


class ImageProcessor(ABC):
    """How a family prepares images; one object a checkpoint.

    Args:
        config: config.json of the checkpoint.
        settings: its preprocessor_config.json, with what the user sets over it. Keys that the
            family does not have are left out of `known` and have no effect.

    Attributes:
        placeholder: what a chat message has where an image is; the tokenizer makes one
            `image_token_id` of it.
        image_token_id: stands for a row of an image's embeddings.
        defaults: values of the keys that the family knows, as transformers has them.

    Raises:
        BadInput: a value has another type, or asks for what is not built.
    """

    placeholder: ClassVar[str]
    image_token_id: int
    defaults: ClassVar[Mapping[str, Any]]
    COMMON: ClassVar[Mapping[str, Any]] = {
        "do_convert_rgb": True,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "rescale_factor": _SCALE,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "resample": int(Image.Resampling.BICUBIC),
    }

    def __init__(self, config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        known = {**self.COMMON, **self.defaults}
        given = {key: value for key, value in settings.items() if key in known}
        self.settings = {**known, **{k: v for k, v in given.items() if v is not None}}
        self.values = values = Values(self.settings, "preprocessor_config.json")
        self.resample = Image.Resampling(values.integer("resample", 0, low=0, high=5))
        self.mean = values.numbers("image_mean") or ()
        self.std = values.numbers("image_std") or ()
        if len(self.mean) != 3 or len(self.std) != 3:
            values.fail("image_mean", "and image_std must be three numbers each")
        self.config = config

    @classmethod
    def check_names(cls, names: Sequence[str]) -> None:
        """Raises BadInput for the name of a setting that the family does not have."""
        known = (*cls.COMMON, *cls.defaults)
        for name in names:
            if name not in known:
                raise BadInput(
                    f"vision.processor: no such setting {name}; {nearest(name, list(known))}"
                )

    @cached_property
    def levels(self) -> NDArray[np.float32]:
        """The value of each of the 256 levels of a pixel in each channel, float32 [3, 256], with
        the rounding of transformers."""
        values = self.values
        levels: NDArray[Any] = np.arange(256).astype(np.float32)
        if values.flag("do_rescale", True):
            factor = values.number("rescale_factor", _SCALE)
            levels = (np.arange(256).astype(np.float64) * factor).astype(np.float32)
        if not values.flag("do_normalize", True):
            return np.stack([levels] * 3)
        mean, std = (np.array(one, np.float32)[:, None] for one in (self.mean, self.std))
        normal: NDArray[np.float32] = (levels[None] - mean) / std
        return normal

    def digest(self, image: Image.Image) -> bytes:
        """128 bits over the pixels of an RGB image, their size and what is done to them."""
        about = json.dumps([type(self).__name__, self.settings, image.size], sort_keys=True)
        state = blake2b(about.encode(), digest_size=DIGEST_BYTES)
        state.update(image.tobytes())
        return state.digest()

    @abstractmethod
    def process(self, image: Image.Image) -> ProcessedImage:
        """What the tower takes of an RGB image.

        Raises:
            BadInput: its shape is none that the family takes.
        """

    @property
    @abstractmethod
    def most_tokens(self) -> int:
        """Rows of the embeddings of the largest image."""

    def expansion(self, image: ProcessedImage, tokenizer: Tokenizer | None) -> Sequence[int]:
        """The tokens in place of the one that marks an image in a prompt. As many of them are
        `image_token_id` as its embeddings have rows."""
        return [self.image_token_id] * image.num_tokens

    @property
    def image_mark(self) -> tuple[int, ...]:
        """The tokens of `placeholder`, for prompts that are made of token ids."""
        return (self.image_token_id,)

    def reference_inputs(
        self, prompts: Sequence[Sequence[ProcessedImage]], token_ids: NDArray[np.int64]
    ) -> dict[str, NDArray[Any]]:
        """The arrays that transformers' model takes beside the token ids of several prompts.

        Args:
            prompts: the images of each.
            token_ids: of each, padded: int64 [prompts, tokens].

        Raises:
            BadInput: that is not known of the family.
        """
        raise BadInput(f"{type(self).__name__}: images are not given to transformers' model")

    def positions(
        self, num_tokens: int, spans: Sequence[ImageSpan], images: Sequence[ProcessedImage]
    ) -> tuple[NDArray[np.int64] | None, int]:
        """Rotary positions of a prompt and the shift of what follows; see RequestInputs."""
        return None, 0


class PromptImages:
    """Puts images into prompts.

    Args:
        processor: of the model's family.
        tokenizer: of the model; None: prompts are token ids.
        cache_bytes: pixels of processed images that are kept for those that come again.
    """

    def __init__(
        self, processor: ImageProcessor, tokenizer: Tokenizer | None, cache_bytes: int = 0
    ) -> None:
        self.processor, self.tokenizer = processor, tokenizer
        self.cache_bytes, self._num_bytes = cache_bytes, 0
        self._kept: OrderedDict[bytes, ProcessedImage] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()  # a server processes images in several threads

    def clear(self) -> None:
        """Forget processed images."""
        with self._lock:
            self._kept.clear()
            self._num_bytes = 0

    def processed(self, image: Image.Image) -> ProcessedImage:
        """What the tower takes of an image, which may be kept from the last time."""
        if not self.cache_bytes:
            return self.processor.process(image)
        digest = self.processor.digest(image)
        done = self.kept(digest)
        if done is None:
            done = self.processor.process(image)
            self.keep(digest, done)
        return done

    def kept(self, digest: bytes) -> ProcessedImage | None:
        """The processed image that is kept under a digest."""
        with self._lock:
            if digest in self._kept:
                self._kept.move_to_end(digest)
            return self._kept.get(digest)

    def keep(self, digest: bytes, done: ProcessedImage) -> None:
        """Keep a processed image; those that were not used for longest make room."""
        with self._lock:
            if digest not in self._kept:
                self._kept[digest] = done
                self._num_bytes += done.pixels.nbytes
            while self._num_bytes > self.cache_bytes:
                self._num_bytes -= self._kept.popitem(last=False)[1].pixels.nbytes

    def insert(
        self, token_ids: Sequence[int], images: Sequence[Image.Image]
    ) -> tuple[list[int], RequestInputs]:
        """A prompt with these images, in RGB; see `with_processed`."""
        return self.with_processed(token_ids, tuple(map(self.processed, images)))

    def with_processed(
        self, token_ids: Sequence[int], done: tuple[ProcessedImage, ...]
    ) -> tuple[list[int], RequestInputs]:
        """A prompt with the tokens of its images, and the images as the engine takes them.

        Args:
            token_ids: with one `image_token_id` for each image, or already with all of an image's
                tokens, as transformers' processor gives them.
            done: the images, in the order of the prompt.

        Raises:
            BadInput: the numbers of images and of placeholders differ.
        """
        processor, token_id = self.processor, self.processor.image_token_id
        marks = [i for i, token in enumerate(token_ids) if token == token_id]
        if len(marks) == sum(image.num_tokens for image in done):
            prompt = list(token_ids)
        elif len(marks) == len(done):
            prompt, begin = [], 0
            for mark, image in zip(marks, done, strict=True):
                prompt += token_ids[begin:mark]
                prompt += processor.expansion(image, self.tokenizer)
                begin = mark + 1
            prompt += token_ids[begin:]
        else:
            raise BadInput(
                f"the prompt has {len(marks)} placeholders of images ({processor.placeholder}, "
                f"token {token_id}) and {len(done)} images: give one for each image"
            )
        spans = tuple(_spans(prompt, token_id, done))
        positions, shift = processor.positions(len(prompt), spans, done)
        return prompt, RequestInputs(done, spans, positions, shift)


def _spans(
    prompt: Sequence[int], token_id: int, images: Sequence[ProcessedImage]
) -> list[ImageSpan]:
    """The runs of placeholders in a prompt, each of one image."""
    rows = ((i, row) for i, image in enumerate(images) for row in range(image.num_tokens))
    places = (i for i, token in enumerate(prompt) if token == token_id)
    spans: list[ImageSpan] = []
    for place, (image, row) in zip(places, rows, strict=True):
        if spans and spans[-1].end == place and spans[-1].image == image:
            spans[-1] = spans[-1]._replace(length=spans[-1].length + 1)
        else:
            spans.append(ImageSpan(place, 1, image, row))
    return spans
