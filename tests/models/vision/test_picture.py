"""Pictures of any origin: what is opened, and one clear error for each that is not."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from minivllm.errors import BadInput
from minivllm.models.vision.picture import FORMATS, PictureLimits, open_picture
from tests.seeing import encoded, picture

ONE = picture(12, 7)
PNG, JPEG = encoded(ONE), encoded(ONE, "JPEG")
LIMITS = PictureLimits(most_bytes=1 << 16, most_pixels=2_000)


def chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG file with its checksum."""
    body = kind + data
    return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))


def png_header(width: int, height: int) -> bytes:
    """A PNG file that says it is so large, and has hardly any data."""
    about = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = chunk(b"IDAT", zlib.compress(b"\0" * 64))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", about) + data + chunk(b"IEND", b"")


def test_one_picture_from_every_origin_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "one.png"
    path.write_bytes(PNG)
    origins: list[Any] = [PNG, bytearray(PNG), memoryview(PNG), path, str(path), ONE]
    for source in (*origins, np.asarray(ONE)):
        opened = open_picture(source)
        assert opened.mode == "RGB" and opened.tobytes() == ONE.tobytes()


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_is_opened(form: str) -> None:
    lossless = {"lossless": True} if form == "WEBP" else {}
    opened = open_picture(encoded(ONE, form, **lossless))
    assert opened.size == (12, 7) and opened.mode == "RGB"
    if form not in ("JPEG", "GIF"):
        assert opened.tobytes() == ONE.tobytes()


def test_a_picture_is_turned_as_its_exif_data_says() -> None:
    about = Image.Exif()
    about[0x0112] = 6  # a camera that was held upright
    opened = open_picture(encoded(ONE, "PNG", exif=about))
    assert opened.size == (7, 12)
    assert opened.tobytes() == ONE.transpose(Image.Transpose.ROTATE_270).tobytes()


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "1", "CMYK", "I;16"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    image = Image.new(mode, (3, 2), 0)
    assert open_picture(image).mode == "RGB"


def test_transparent_parts_are_on_white() -> None:
    image = Image.new("RGBA", (2, 1), (10, 20, 30, 0))
    image.putpixel((1, 0), (10, 20, 30, 255))
    opened = open_picture(encoded(image))
    assert [opened.getpixel((x, 0)) for x in (0, 1)] == [(255, 255, 255), (10, 20, 30)]
    palette = Image.new("P", (1, 1), 0)
    palette.info["transparency"] = 0
    assert open_picture(palette).getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("form", ["PNG", "TIFF", None])
@pytest.mark.parametrize("orientation", [1, 3])
def test_grey_of_16_bits_is_scaled(form: str | None, orientation: int) -> None:
    values = np.arange(0, 65536, 256, dtype=np.uint16)[None].repeat(2, 0)
    about = Image.Exif()
    about[0x0112] = orientation
    image = Image.fromarray(values)
    opened = open_picture(encoded(image, form, exif=about) if form else image)
    expected = values[0] >> 8 if orientation == 1 or not form else values[0, ::-1] >> 8
    assert np.array_equal(np.asarray(opened)[1, :, 2], expected)


def test_grey_of_16_bits_keeps_white_at_zero_and_transparency() -> None:
    image = Image.fromarray(np.array([[0, 65535, 4096]], dtype=np.uint16))
    inverted = encoded(image, "TIFF", tiffinfo={262: 0})
    assert np.asarray(open_picture(inverted))[0, :, 0].tolist() == [255, 0, 239]
    image.info["transparency"] = 4096
    assert np.asarray(open_picture(image))[0, :, 0].tolist() == [0, 255, 255]


@pytest.mark.parametrize(("dtype", "words"), [("int32", "32-bit integers"), ("float32", "floats")])
def test_pixels_without_a_known_range_are_refused(dtype: str, words: str) -> None:
    image = Image.fromarray(np.full((2, 2), 7, dtype=dtype))
    for source in (image, encoded(image, "TIFF")):
        with pytest.raises(BadInput, match=f"image 3 has pixels of {words} .*convert it to 8"):
            open_picture(source, what="image 3")


def test_alpha_of_every_mode_is_on_white() -> None:
    for mode in ("LA", "PA", "La", "RGBa", "RGBA"):
        assert open_picture(Image.new(mode, (1, 1), 0)).getpixel((0, 0)) == (255, 255, 255), mode
    palette = Image.new("P", (1, 1), 0)
    palette.putpalette([9, 9, 9, 0], "RGBA")
    assert open_picture(palette).getpixel((0, 0)) == (255, 255, 255)


def test_of_an_animation_the_first_frame_counts() -> None:
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    stream = io.BytesIO()
    frames[0].save(stream, "GIF", save_all=True, append_images=frames[1:])
    assert open_picture(stream.getvalue()).getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (b"", "image 3 is broken or no picture of a known format"),
        (b"hello", "broken or no picture"),
        (PNG[:40], "broken or no picture"),
        (JPEG[: len(JPEG) // 2], "broken or no picture"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "broken or no picture"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "broken or no picture"),
        (7, "image 3 is a int: give a PIL image"),
        (None, "is a NoneType"),
        (np.zeros((2, 2), np.uint8), r"array of uint8 \[2, 2\]"),
        (np.zeros((2, 2, 3)), r"array of float64 \[2, 2, 3\]"),
        (Image.new("RGB", (0, 3)), "image 3 has no pixels"),
        (Path("nowhere.png"), r"image 3 nowhere\.png"),
    ],
)
def test_what_is_no_picture_is_one_clear_error(source: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        open_picture(source, what="image 3")
    assert "\n" not in str(caught.value) and str(caught.value).startswith("image 3")
    assert " at 0x" not in str(caught.value)


def test_a_file_is_bounded_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "large.png"
    path.write_bytes(PNG + bytes(1 << 17))
    for source, words in ((path, "smaller picture"), (path.read_bytes(), "max_image_mb")):
        with pytest.raises(BadInput, match=words):
            open_picture(source, LIMITS)


@pytest.mark.parametrize("side", [50, 60_000, (1 << 31) - 1])
def test_pixels_are_bounded_before_they_are_decoded(side: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of Pillow, on what might be a decompression bomb
        with pytest.raises(BadInput, match=r"max_megapixels|broken or no picture"):
            open_picture(png_header(side, side), LIMITS)


@given(st.data())
def test_damaged_files_are_pictures_or_one_error(data: st.DataObject) -> None:
    whole = data.draw(st.sampled_from([PNG, JPEG, encoded(ONE, "GIF"), encoded(ONE, "TIFF")]))
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(damaged) - 1))
        damaged[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(damaged)))
    try:
        opened = open_picture(bytes(damaged[:cut]), LIMITS)
    except BadInput as error:
        assert "\n" not in str(error)
    else:
        assert opened.mode == "RGB" and opened.width * opened.height <= LIMITS.most_pixels
