"""Pictures of any origin, opened within limits. Free of torch."""

from __future__ import annotations

import base64
import io
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from minivllm.errors import BadInput, first_line
from minivllm.platform.untrusted import MIB, read_bytes, size

# Others have programs behind them (EPS), or are rarely what a person sends.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_UNREADABLE = (
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
    OSError,
    ValueError,
    TypeError,
    SyntaxError,
    EOFError,
    MemoryError,
    IndexError,
    KeyError,
    OverflowError,
    struct.error,
    zlib.error,
)


@dataclass(frozen=True)
class PictureLimits:
    """How large a picture may be.

    Attributes:
        most_bytes: of a file.
        most_pixels: width times height, read from the header before anything is decoded.
    """

    most_bytes: int = 32 * MIB
    most_pixels: int = 50_000_000


DEFAULT_LIMITS = PictureLimits()


def open_picture(
    source: Any, limits: PictureLimits = DEFAULT_LIMITS, what: str = "image"
) -> Image.Image:
    """A picture in RGB, turned as its EXIF data says, transparent parts on white; of an animation
    the first frame.

    Args:
        source: the bytes of a file, its path, a PIL image, or an array uint8 [height, width, 3].
        limits: of files and pixels.
        what: the picture's name in errors.

    Raises:
        BadInput: it is none of these, is broken or too large.
    """
    if isinstance(source, (str, os.PathLike)):
        path = Path(os.path.expanduser(source))
        source = read_bytes(path, limits.most_bytes, f"{what} {path}", "give a smaller picture")
    try:
        image = _opened(source, limits, what)
        _check_size(image.size, limits, what)
        return _rgb(ImageOps.exif_transpose(image))
    except _UNREADABLE as error:
        raise BadInput(
            f"{what} is broken or no picture of a known format ({', '.join(FORMATS)}): "
            f"{type(error).__name__}: {first_line(error)[:120]}"
        ) from None


def _opened(source: Any, limits: PictureLimits, what: str) -> Image.Image:
    """A picture whose pixels need not be decoded yet."""
    if isinstance(source, Image.Image):
        return source
    if isinstance(source, (bytes, bytearray, memoryview)):
        if len(source) > limits.most_bytes:
            raise BadInput(
                f"{what} has {size(len(source))}, and at most {size(limits.most_bytes)} are read "
                "(vision.max_image_mb)"
            )
        return Image.open(io.BytesIO(source), formats=FORMATS)
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.ndim != 3 or source.shape[2] != 3:
            raise BadInput(
                f"{what} is an array of {source.dtype} {list(source.shape)}: give uint8 [height, "
                "width, 3]"
            )
        return Image.fromarray(source)
    raise BadInput(
        f"{what} is a {type(source).__name__}: give a PIL image, a path, the bytes of a file or an "
        "array uint8 [height, width, 3]"
    )


def data_uri(data: bytes) -> str:
    """A picture's file, in one of FORMATS, as a data: URI."""
    kind = Image.MIME[str(Image.open(io.BytesIO(data), formats=FORMATS).format)]
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _check_size(shape: tuple[int, int], limits: PictureLimits, what: str) -> None:
    width, height = shape
    if width * height > limits.most_pixels:
        raise BadInput(
            f"{what} has {width} x {height} pixels, and at most {limits.most_pixels:,} are decoded "
            "(vision.max_megapixels)"
        )
    if not width * height:
        raise BadInput(f"{what} has no pixels")


def _rgb(image: Image.Image) -> Image.Image:
    """The picture in RGB, as transformers converts it."""
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")
