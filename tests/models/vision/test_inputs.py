"""Keys of the prefix cache where images are."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from minivllm.cache.prefix import PrefixIndex, block_keys
from minivllm.models.vision.inputs import ImageSpan, ProcessedImage, RequestInputs

PIXELS = np.zeros((1, 3, 1, 1), np.uint8)


def image(digest: bytes, num_tokens: int) -> ProcessedImage:
    return ProcessedImage(digest, PIXELS, num_tokens)


def test_the_parts_of_spans_say_which_rows_they_are() -> None:
    spans = (ImageSpan(2, 4, 0), ImageSpan(8, 3, 0, 4), ImageSpan(11, 2, 1))
    inputs = RequestInputs((image(b"a", 7), image(b"b", 2)), spans)
    assert [*inputs.within(4, 9)] == [ImageSpan(4, 2, 0, 2), ImageSpan(8, 1, 0, 4)]
    assert [*inputs.within(0, 2)] == [*inputs.within(6, 8)] == []
    assert [*inputs.within(10, 20)] == [ImageSpan(10, 1, 0, 6), ImageSpan(11, 2, 1)]


def test_a_block_carries_where_an_image_begins_its_digest_and_its_row() -> None:
    inputs = RequestInputs((image(b"a", 4),), (ImageSpan(2, 4, 0),))
    keyed = inputs.keyed([5, 6, 9, 9, 9, 9, 7, 8])
    assert len(keyed) == 8 and keyed[0] == 5
    assert keyed[0:4] == (5, 6, 9, 9, (2, b"a", 0))
    assert keyed[4:8] == (9, 9, 7, 8, (0, b"a", 2))
    assert keyed[6:8] == (7, 8)


@given(
    block_size=st.integers(1, 9),
    before=st.integers(0, 12),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    after=st.integers(1, 12),
    swapped=st.integers(0, 3),
)
def test_a_swapped_picture_of_the_same_size_shares_no_block_from_its_place_on(
    block_size: int, before: int, lengths: list[int], after: int, swapped: int
) -> None:
    """The placeholders are the same tokens; a block before the picture is shared, none that it
    touches, and none after it, since keys are chained."""
    spans, images, start = [], [], before
    for i, length in enumerate(lengths):
        spans.append(ImageSpan(start, length, i))
        images.append(image(b"%d" % i, length))
        start += length + i % 2  # some lie side by side
    tokens = [99] * (start + after)
    index = PrefixIndex(block_size, 1000)
    own = RequestInputs(tuple(images), tuple(spans)).keyed(tokens)
    node = index.root
    for block, key in enumerate(block_keys(own, block_size, range(len(tokens) // block_size)), 1):
        node = index.insert(node, key, block)
    place = swapped % len(lengths)
    images[place] = image(b"other", lengths[place])
    other = RequestInputs(tuple(images), tuple(spans)).keyed(tokens)
    whole = len(tokens) // block_size
    assert len(index.match(own, whole)) == whole
    untouched = min(spans[place].start // block_size, whole)
    assert len(index.match(other, whole)) == untouched
