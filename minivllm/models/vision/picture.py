"""Pictures of any origin, opened within limits. Free of torch."""

from __future__ import annotations

import base64
import io
import os
import re
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
_WIDE = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")  # Pillow's modes with more than 8 bits
_ADDRESS = re.compile(r"<[^<>]* at 0x[0-9a-fA-F]+>")
PHOTOMETRIC = 262  # the tag of a TIFF that says what black and white are


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
    """A picture in RGB, turned as its EXIF data says, transparent parts on white, grey of 16 bits
    scaled to 8; of an animation the first frame.

    Args:
        source: the bytes of a file, its path, a PIL image, or an array uint8 [height, width, 3].
        limits: of files and pixels.
        what: the picture's name in errors.

    Raises:
        BadInput: it is none of these, is broken or too large, or has pixels without a known range
            (32-bit integers and floats).
    """
    if isinstance(source, (str, os.PathLike)):
        path = Path(os.path.expanduser(source))
        what = f"{what} {path}"
        source = read_bytes(path, limits.most_bytes, what, "give a smaller picture")
    try:
        image = _opened(source, limits, what)
        _check_size(image.size, limits, what)
        turned = ImageOps.exif_transpose(image)
        return _rgb(turned if image.mode not in _WIDE else _eight_bits(turned, image, what))
    except BadInput:
        raise
    except _UNREADABLE as error:
        # Pillow names what it reads by its address in memory.
        reason = _ADDRESS.sub("the data", first_line(error))[:120]
        raise BadInput(
            f"{what} is broken or no picture of a known format ({', '.join(FORMATS)}): "
            f"{type(error).__name__}: {reason}"
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


def _eight_bits(image: Image.Image, source: Image.Image, what: str) -> Image.Image:
    """A grey picture of more than 8 bits as one of 8, which Pillow's own conversion would clip.

    Args:
        image: as it is shown.
        source: as it was opened, with what its file says of it.
        what: its name in errors.

    Raises:
        BadInput: its pixels have no known range.
    """
    if not (image.mode.startswith("I;16") or (image.mode == "I" and source.format == "PNG")):
        kind = "floats" if image.mode == "F" else "32-bit integers"
        raise BadInput(
            f"{what} has pixels of {kind} (mode {image.mode}), whose range from black to white is "
            "not known: convert it to 8 or 16 bits"
        )
    values = np.asarray(image)
    grey = (values.clip(0, 65535) >> 8).astype(np.uint8)
    if getattr(source, "tag_v2", {}).get(PHOTOMETRIC) == 0:  # a TIFF whose 0 is white
        grey = 255 - grey
    if isinstance(clear := source.info.get("transparency"), int):
        grey[values == clear] = 255
    return Image.fromarray(grey)


def _rgb(image: Image.Image) -> Image.Image:
    """The picture in RGB, as transformers converts it."""
    if image.mode == "La":  # with colours that are multiplied by alpha
        image = image.convert("LA")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")
