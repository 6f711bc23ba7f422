"""Pictures of a workload, by names that say all of them: a generated one by its size and seed, a
file by its content and place. Free of torch."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image

from minivllm.errors import BadInput
from minivllm.models.vision.picture import DEFAULT_LIMITS, open_picture
from minivllm.platform.untrusted import printable, read_bytes

_STREAM = 0x91C7
_OTHER = 1 << 30  # turned in the seed of another picture
_CELLS = 16  # of a generated picture in each direction: colours that blend into each other
_GENERATED = re.compile(r"generated:(\d+)x(\d+):(\d+)")
_FILE = re.compile(r"sha256:([0-9a-f]{64})#(.+)", re.DOTALL)


class PictureReader(Protocol):
    """A model as far as its images go."""

    image_mark: tuple[int, ...]  # stands for an image in a prompt

    def expand(self, token_ids: Sequence[int], pictures: Sequence[str]) -> tuple[int, ...]:
        """A prompt with all tokens of its images, which has a mark for each.

        Raises:
            BadInput: the model takes no images, or these do not fit the prompt.
        """

    def parts(
        self, token_ids: Sequence[int], pictures: Sequence[str]
    ) -> list[tuple[int, ...] | str]:
        """The text and the images of an expanded prompt, in order: runs of token ids, and names in
        place of images with their marks."""


def generated(width: int, height: int, seed: int) -> str:
    """The name of a picture that `draw` makes."""
    return f"generated:{width}x{height}:{seed}"


def of_file(path: Path, what: str) -> str:
    """The name of a picture's file. Raises BadInput where it cannot be read."""
    content = read_bytes(path, DEFAULT_LIMITS.most_bytes, f"{what} {printable(str(path))}")
    return f"sha256:{hashlib.sha256(content).hexdigest()}#{path.resolve()}"


def content(name: str) -> str:
    """What of a name says which picture it is, wherever its file lies."""
    return name.partition("#")[0]


def another(name: str) -> str:
    """The name of a generated picture of the same size as the named one, but with other pixels."""
    if (match := _GENERATED.fullmatch(name)) is not None:
        width, height, seed = map(int, match.groups())
        return generated(width, height, seed ^ _OTHER)
    seed = int(hashlib.sha256(content(name).encode()).hexdigest()[:7], 16)
    return generated(*draw(name).size, seed)


def encoded(name: str) -> bytes:
    """The bytes of a picture as a file: a file's own, of a generated one PNG.

    Raises:
        BadInput: see `draw`.
    """
    if (match := _FILE.fullmatch(name)) is not None:
        return _file(*match.groups())
    stream = io.BytesIO()
    draw(name).save(stream, "PNG")
    return stream.getvalue()


def draw(name: str) -> Image.Image:
    """The picture of a name, in RGB.

    Raises:
        BadInput: its file is another than it was, is broken or gone; or it is no such name.
    """
    if (match := _GENERATED.fullmatch(name)) is not None:
        width, height, seed = map(int, match.groups())
        cells = np.random.default_rng([_STREAM, seed]).integers(0, 256, (_CELLS, _CELLS, 3))
        small = Image.fromarray(cells.astype(np.uint8))
        return small.resize((width, height), Image.Resampling.BICUBIC)
    if (match := _FILE.fullmatch(name)) is None:
        raise BadInput(f"{name!r:.60} is no picture of a workload")
    digest, path = match.groups()
    return open_picture(_file(digest, path), what=f"image {printable(path)}")


def _file(digest: str, path: str) -> bytes:
    """The bytes of a file. Raises BadInput where it is another than it was."""
    what = f"image {printable(path)}"
    data = read_bytes(Path(path), DEFAULT_LIMITS.most_bytes, what)
    if hashlib.sha256(data).hexdigest() != digest:
        raise BadInput(f"{what} has changed since the workload was made: make it again")
    return data
