"""The images of requests, as an engine in this process takes them, or a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from PIL import Image

from minivllm.bench.workloads.pictures import draw, encoded
from minivllm.errors import BadInput
from minivllm.extras.vision.options import VisionOptions
from minivllm.extras.vision.pictures import NO_IMAGES, Pictures, fitting_processor
from minivllm.models.load.source import Source
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.models.vision.inputs import RequestInputs
from minivllm.models.vision.picture import data_uri
from minivllm.models.vision.processor import PromptImages


class EnginePictures:
    """A PictureReader that also keeps pictures, so that none is drawn or decoded while requests
    are timed, and the names of those that requests have.

    Args:
        prompts: puts images into prompts.
    """

    def __init__(self, prompts: PromptImages) -> None:
        self.prompts = prompts
        self.image_mark = prompts.processor.image_mark
        self._drawn: dict[str, Image.Image] = {}
        self._noted: dict[str, tuple[str, ...]] = {}  # by request, until it is submitted

    @classmethod
    def of(cls, pictures: Pictures) -> Self | None:
        """For a model that takes images; None for another."""
        return None if pictures.prompts is None else cls(pictures.prompts)

    @classmethod
    def of_source(
        cls, source: Source, tokenizer: Tokenizer | None, options: VisionOptions
    ) -> Self | None:
        """The same for a model that another engine loads, whose images are processed as this
        project's engine does it.

        Raises:
            BadInput: a setting of the processor is wrong, or set for a model that takes no images.
        """
        return cls.of(Pictures(fitting_processor(options, source), tokenizer, options))

    def expand(self, token_ids: Sequence[int], pictures: Sequence[str]) -> tuple[int, ...]:
        return tuple(self.prompts.insert(token_ids, self._images(pictures))[0])

    def parts(self, token_ids: Sequence[int], names: Sequence[str]) -> list[tuple[int, ...] | str]:
        processor, tokenizer, ids = self.prompts.processor, self.prompts.tokenizer, tuple(token_ids)
        at = self.image_mark.index(processor.image_token_id)
        before, after = self.image_mark[:at], self.image_mark[at + 1 :]
        parts: list[tuple[int, ...] | str] = []
        begin = 0
        for name, image in zip(names, self._images(names), strict=True):
            inner = processor.expansion(self.prompts.processed(image), tokenizer)
            whole = (*before, *inner, *after)
            first = begin
            while ids[first : first + len(whole)] != whole:
                first += 1
                if first > len(ids) - len(whole):
                    raise BadInput(f"the prompt does not have all tokens of its image {name}")
            parts += [ids[begin:first], name] if first > begin else [name]
            begin = first + len(whole)
        return [*parts, ids[begin:]] if begin < len(ids) else parts

    def _images(self, names: Sequence[str]) -> list[Image.Image]:
        for name in names:
            if name not in self._drawn:
                self._drawn[name] = draw(name)
        return [self._drawn[name] for name in names]

    def note(self, request_id: str, names: Sequence[str]) -> None:
        self._noted[request_id] = tuple(names)

    def take(self, request_id: str, token_ids: Sequence[int]) -> RequestInputs | None:
        """The images of a request that is submitted, processed; None where it has none."""
        if (names := self._noted.pop(request_id, None)) is None:
            return None
        return self.prompts.insert(token_ids, self._images(names))[1]

    def reset(self) -> None:
        """Forget requests that were not submitted, and processed images."""
        self._noted.clear()
        self.prompts.clear()


class SentPictures(EnginePictures):
    """Images that a server is sent within messages, each written as a data: URI once, before
    requests are timed."""

    def __init__(self, prompts: PromptImages) -> None:
        super().__init__(prompts)
        self._uris: dict[str, str] = {}

    def expand(self, token_ids: Sequence[int], pictures: Sequence[str]) -> tuple[int, ...]:
        for name in pictures:
            self._uri(name)
        return super().expand(token_ids, pictures)

    def content(self, request_id: str, token_ids: Sequence[int]) -> list[dict[str, Any]] | None:
        """The content of a message with the text and the images of a request that is submitted, in
        the form of the chat API; None where it has no images."""
        tokenizer = self.prompts.tokenizer
        if tokenizer is None or (names := self._noted.pop(request_id, None)) is None:
            return None
        return [
            {"type": "image_url", "image_url": {"url": self._uri(part)}}
            if isinstance(part, str)
            else {"type": "text", "text": tokenizer.decode(part)}
            for part in self.parts(token_ids, names)
        ]

    def _uri(self, name: str) -> str:
        if name not in self._uris:
            self._uris[name] = data_uri(encoded(name))
        return self._uris[name]


class TakesImages:
    """Base of engines that take images.

    Attributes:
        pictures: None: the model takes none.
    """

    pictures: EnginePictures | None

    def note_images(self, request_id: str, names: Sequence[str]) -> None:
        """See SeeingEngine. Raises BadInput where the model takes none."""
        if self.pictures is None:
            raise BadInput(NO_IMAGES)
        self.pictures.note(request_id, names)
