"""What all workload generators have in common: for whom requests are made, and knobs that several
have."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from minivllm.bench.workloads.from_file.tables import saved_files
from minivllm.bench.workloads.lengths import Lengths
from minivllm.bench.workloads.options import FromFileOptions
from minivllm.bench.workloads.pictures import PictureReader
from minivllm.bench.workloads.prompts import Encode, draw_prompts
from minivllm.bench.workloads.workload import Workload
from minivllm.errors import BadInput
from minivllm.models.load.reserved_ids import UNNAMED, Reserved
from minivllm.platform.options import Options
from minivllm.platform.untrusted import place

Decode = Callable[[list[int]], str | None]
RenderChat = Callable[[Sequence[dict[str, Any]]], tuple[str, tuple[int, ...]]]
FEWER = "take fewer with workload.num_requests"


@dataclass(frozen=True)
class Reader:
    """A model as far as its requests go.

    Args:
        encode: text to token ids; None without a tokenizer.
        vocab_size: number of token ids.
        max_model_len: longest context, in tokens.
        decode: token ids to text, to store the prompts' text beside their ids; None leaves it out.
        render_chat: messages to the text that the chat template writes and its token ids; None
            without a template.
        takes_chat: whether the engine is sent messages as they are, with images and tools.
        pictures: of a model that takes images, where its engine does.
        reserved: ids that no random prompt may hold, see `reserved_ids`.
    """

    encode: Encode | None
    vocab_size: int
    max_model_len: int
    decode: Decode | None
    render_chat: RenderChat | None = None
    takes_chat: bool = False
    pictures: PictureReader | None = None
    reserved: Reserved = UNNAMED

    @property
    def encode_further(self) -> Encode | None:
        """The same for text that follows on other text: without the tokens that the tokenizer puts
        around everything."""
        if (encode := self.encode) is None:
            return None
        around = encode("")

        def further(text: str) -> list[int]:
            token_ids = encode(text)
            begin = 0
            while begin < len(around) and token_ids[begin : begin + 1] == around[begin : begin + 1]:
                begin += 1
            end = around[begin:]
            stop = len(token_ids) - len(end)
            return token_ids[begin:stop] if token_ids[stop:] == end else token_ids[begin:]

        return further

    def draw(
        self, lengths: list[int], encode: Encode | None, rng: np.random.Generator
    ) -> list[tuple[int, ...]]:
        """Prompts of these lengths, see `draw_prompts`."""
        return draw_prompts(lengths, encode, self.vocab_size, rng, self.reserved)

    def text(self, token_ids: Sequence[int]) -> str | None:
        """What is stored beside a prompt's ids."""
        return self.decode(list(token_ids)) if self.decode else None


class Generator(ABC):
    """Makes the requests of a workload."""

    name: str  # of its option

    @abstractmethod
    def check_lengths(self, max_model_len: int) -> None:
        """Fail early, before any engine is built, if a request may be longer than the context.

        Raises:
            BadInput: naming the lengths.
        """

    def generate(
        self,
        encode: Encode | None,
        vocab_size: int,
        max_model_len: int,
        seed: int,
        decode: Decode | None = None,
        render_chat: RenderChat | None = None,
        takes_chat: bool = False,
        pictures: PictureReader | None = None,
        reserved: Reserved = UNNAMED,
    ) -> Workload:
        """Make the requests; equal arguments make equal requests.

        Args:
            encode, vocab_size, max_model_len, decode, render_chat, takes_chat, pictures, reserved:
                see `Reader`.
            seed: of lengths and prompts.

        Raises:
            BadInput: a request is longer than the context, or cannot be made.
        """
        model = encode, vocab_size, max_model_len, decode, render_chat, takes_chat, pictures
        return self.make(Reader(*model, reserved), seed)

    @abstractmethod
    def make(self, reader: Reader, seed: int) -> Workload:
        """What `generate` returns, from the model's reader of text and pictures."""


class Drawn(Options, Generator):
    """A generator that draws lengths: its options have `input_len`, `output_len` and more of
    `LENGTHS`."""

    LENGTHS: ClassVar[tuple[str, ...]] = ("input_len", "output_len")

    def __post_init__(self) -> None:
        super().__post_init__()
        # The distributions, by knob.
        self.lengths = {
            name: Lengths.parse(f"workload.{name}", getattr(self, name)) for name in self.LENGTHS
        }


class FromFile(FromFileOptions, Generator):
    """A generator that reads requests.

    Raises:
        BadInput: there is no `path`; names what to set.
    """

    ADVICE: ClassVar[str]  # what to do without a path

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path:
            raise BadInput(f"workload={self.name} needs {self.ADVICE}")
        self.file = place(self.path, f"workload.path={self.path}")

    @property
    def skips(self) -> bool:
        """Whether a request that the context cannot hold is left out."""
        return self.too_long == "skip"

    def check_lengths(self, max_model_len: int) -> None:
        """Read the file and fail early, before any engine is built, on what cannot be served.

        A sweep asks this of each of its arms: a file that was found good is not read again while it
        stays as it is.

        Raises:
            BadInput: the file is missing, a line is wrong, or a request is longer than the context.
        """
        try:
            state = tuple(map(_state, (self.file, *saved_files(self.file))))
        except (OSError, ValueError):
            return self.check_file(max_model_len)  # which says what is wrong
        checked = (type(self), repr(vars(self)), state, max_model_len)
        if checked not in _CHECKED:
            self.check_file(max_model_len)
            _CHECKED.add(checked)

    @abstractmethod
    def check_file(self, max_model_len: int) -> None:
        """Read the whole file and raise BadInput for a request that cannot be served."""


def _state(path: Path) -> tuple[int, ...]:
    """What changes when a file does."""
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


# Files that were found good, with the knobs that they were found good for.
_CHECKED: set[tuple[object, ...]] = set()
