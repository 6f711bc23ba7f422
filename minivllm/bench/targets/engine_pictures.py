"""The images of requests, as an engine in this process takes them."""

from __future__ import annotations

from collections.abc import Sequence

from PIL import Image

from minivllm.bench.workloads.pictures import draw
from minivllm.errors import BadInput
from minivllm.extras.vision.pictures import NO_IMAGES, Pictures
from minivllm.models.vision.inputs import RequestInputs
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
    def of(cls, pictures: Pictures) -> EnginePictures | None:
        """For a model that takes images; None for another."""
        return None if pictures.prompts is None else cls(pictures.prompts)

    def expand(self, token_ids: Sequence[int], pictures: Sequence[str]) -> tuple[int, ...]:
        """See PictureReader."""
        return tuple(self.prompts.insert(token_ids, self._images(pictures))[0])

    def _images(self, names: Sequence[str]) -> list[Image.Image]:
        for name in names:
            if name not in self._drawn:
                self._drawn[name] = draw(name)
        return [self._drawn[name] for name in names]

    def note(self, request_id: str, names: Sequence[str]) -> None:
        """See SeeingEngine.note_images."""
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


def require_pictures(pictures: EnginePictures | None) -> EnginePictures:
    """The images of an engine. Raises BadInput where its model takes none."""
    if pictures is None:
        raise BadInput(NO_IMAGES)
    return pictures
