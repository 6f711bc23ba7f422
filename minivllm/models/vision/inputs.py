"""Images of a request: which of its tokens stand for which embeddings. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

DIGEST_BYTES = 16


@dataclass(frozen=True, eq=False)
class ProcessedImage:
    """An image as a vision tower takes it.

    Attributes:
        digest: 128 bits over the decoded pixels, their size and what the processor does to them.
        pixels: uint8, in the layout of the family; not yet normalised.
        num_tokens: rows of the image's embeddings.
        grid: the family's own numbers, such as rows and columns of tiles.
    """

    digest: bytes
    pixels: NDArray[np.uint8]
    num_tokens: int
    grid: tuple[int, ...] = ()


class ImageSpan(NamedTuple):
    """Tokens [start, start + length) of a prompt, which stand for rows of an image's embeddings."""

    start: int
    length: int
    image: int  # its place among the images of the request
    offset: int = 0  # the first of these rows

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.length


@dataclass(frozen=True, eq=False)
class RequestInputs:
    """What a request has besides tokens.

    Attributes:
        images: in the order of the prompt.
        spans: in the order of the prompt; they do not overlap.
        positions: int64 [3, prompt tokens], the rotary positions of the prompt in time, height and
            width; None where these are the positions of the tokens.
        shift: what is added to the position of a token after the prompt to give its rotary one.
    """

    images: tuple[ProcessedImage, ...]
    spans: tuple[ImageSpan, ...]
    positions: NDArray[np.int64] | None = None
    shift: int = 0

    def within(self, start: int, end: int) -> Iterator[ImageSpan]:
        """The parts of the spans that lie in tokens [start, end)."""
        for span in self.spans:
            first, last = max(start, span.start), min(end, span.end)
            if first < last:
                yield ImageSpan(first, last - first, span.image, span.offset + first - span.start)

    def keyed(self, token_ids: Sequence[int]) -> Sequence[int]:
        """The tokens of the request as the prefix cache compares them."""
        return KeyedTokens(token_ids, self._marks)

    def _marks(self, start: int, end: int) -> Iterator[Hashable]:
        """For each part of an image in these positions where it begins, the image's digest and the
        first row of its embeddings."""
        for part in self.within(start, end):
            yield part.start - start, self.images[part.image].digest, part.offset


class KeyedTokens(Sequence[int]):
    """Tokens whose slices carry marks, so that two blocks are the same only where their marks are.

    A slice is a tuple: the token ids, then the marks.

    Args:
        token_ids: the tokens, or those that carry other marks already.
        marks: what stands for something else than the tokens between two positions.
    """

    def __init__(
        self, token_ids: Sequence[int], marks: Callable[[int, int], Iterable[Hashable]]
    ) -> None:
        self._token_ids, self._marks = token_ids, marks

    def __len__(self) -> int:
        return len(self._token_ids)

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return self._token_ids[index]
        start, end, _ = index.indices(len(self))
        return (*self._token_ids[start:end], *self._marks(start, end))


def keyed(
    token_ids: Sequence[int], inputs: RequestInputs | None, salt: str | None
) -> Sequence[int]:
    """Tokens as the prefix cache compares them: those of images carry their digests, and all of
    them the salt of the request."""
    tokens = token_ids if inputs is None else inputs.keyed(token_ids)
    return tokens if salt is None else KeyedTokens(tokens, lambda start, end: (salt,))
