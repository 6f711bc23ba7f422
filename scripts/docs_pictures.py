"""Pictures of the documentation, each with a digest of what it shows in its file."""

from __future__ import annotations

import hashlib
import inspect
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType

from PIL import Image

from minivllm.platform import files

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "reports" / "examples" / "cpu"
IMAGES = ROOT / "docs" / "images"
KEYWORD = b"Shows"  # of the PNG file's text
HEADER = 33  # bytes of a PNG before the first chunk that may be text


@dataclass(frozen=True)
class Picture:
    """One picture of docs/images.

    Attributes:
        draw: makes the PNG from the paths of `sources`; named as the picture.
        sources: files below reports/examples/cpu, which alone it is drawn from.
        shows: text that the picture shows, or code that draws it, apart from `draw`.
    """

    draw: Callable[..., bytes]
    sources: tuple[str, ...]
    shows: Callable[[], str] = str

    @property
    def file(self) -> Path:
        """Where the picture lies."""
        return IMAGES / f"{self.draw.__name__.replace('live_view', 'live-view')}.png"

    @property
    def paths(self) -> list[Path]:
        """The paths of its sources."""
        return [EXAMPLES / name for name in self.sources]

    def digest(self) -> str:
        """Of its sources, of the functions of its script that draw it, and of what it shows."""
        content = hashlib.sha256()
        for path in self.paths:
            content.update(hashlib.sha256(path.read_bytes()).digest())
        content.update(code(self.draw).encode())
        content.update(self.shows().encode())
        return content.hexdigest()[:16]

    def write(self) -> None:
        """Draw it and write its file."""
        text = KEYWORD + b"\0" + self.digest().encode()
        chunk = struct.pack(">I", len(text)) + b"tEXt" + text
        chunk += struct.pack(">I", zlib.crc32(b"tEXt" + text))
        drawn = self.draw(*self.paths)
        files.atomically(
            self.file,
            lambda path: path.write_bytes(drawn[:HEADER] + chunk + drawn[HEADER:]) and None,  # type: ignore[func-returns-value]
        )

    def is_stale(self) -> bool:
        """Whether the file shows something else than what it would be drawn from now."""
        with Image.open(self.file) as image:
            image.load()
            return image.info.get(KEYWORD.decode()) != self.digest()


def code(function: Callable[..., object]) -> str:
    """The source of a function and of those functions of the same file that it uses."""
    assert isinstance(function, FunctionType)
    found = {function.__name__: function}
    waiting = [function]
    while waiting:
        for name in _names(waiting.pop().__code__):
            used = function.__globals__.get(name)
            own = isinstance(used, FunctionType) and used.__module__ == function.__module__
            if own and name not in found:
                found[name] = used
                waiting.append(used)
    return "".join(inspect.getsource(found[name]) for name in sorted(found))


def _names(code: CodeType) -> set[str]:
    """The names that a function's code uses, with those of the functions inside it."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return {*code.co_names}.union(*map(_names, inner))
