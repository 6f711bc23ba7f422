"""Pictures that a user shows in a conversation. Torch-free."""

from __future__ import annotations

import base64
from pathlib import Path

from minivllm.models.vision.picture import data_uri, open_picture
from minivllm.platform.untrusted import MIB, read_bytes

MOST_BYTES = 32 * MIB


def picture_uri(path: str) -> tuple[str, tuple[int, int]]:
    """A picture's file as a data: URI, and the picture's width and height.

    Raises:
        BadInput: there is no such file, or it is no picture or too large.
    """
    what = f"/image {path}"
    data = read_bytes(Path(path).expanduser(), MOST_BYTES, what, "give a smaller picture")
    size = open_picture(data, what=what).size
    return data_uri(data), size


def picture_bytes(uri: str) -> bytes:
    """The file that `picture_uri` has made a URI of."""
    return base64.b64decode(uri.partition(",")[2])
