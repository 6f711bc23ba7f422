"""Where the prompts of synthetic workloads come from: pieces of text, or random ids without a
tokenizer."""

from __future__ import annotations

import importlib
import inspect
from bisect import bisect_right
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

from minivllm.bench.workloads.lazy_prompt import draw_ids
from minivllm.errors import BadInput
from minivllm.models.load.reserved_ids import UNNAMED, Reserved

HELD_OUT = Path(__file__).parents[2] / "assets" / "tiny" / "heldout.txt"
FALLBACK_MODULES = ("argparse", "textwrap", "json.decoder", "csv", "heapq", "shlex", "statistics")
CHARACTERS_PER_TOKEN = 6  # enough for most tokenizers on the first try

Encode = Callable[[str], list[int]]


@cache
def source_text() -> str:
    """Text that the embedded model was not trained on; standard library sources where it is
    missing."""
    if HELD_OUT.is_file():
        return HELD_OUT.read_text(encoding="utf-8")
    return "\n".join(inspect.getsource(importlib.import_module(name)) for name in FALLBACK_MODULES)


@cache
def _line_starts() -> list[int]:
    """Where the lines of `source_text()` begin that are not blank, and the first."""
    text = source_text()
    breaks = (i for i, character in enumerate(text) if character == "\n")
    return [0, *(i + 1 for i in breaks if text[i + 1 : i + 2].strip())]


def draw_prompts(
    lengths: list[int],
    encode: Encode | None,
    vocab_size: int,
    rng: np.random.Generator,
    reserved: Reserved = UNNAMED,
) -> list[tuple[int, ...]]:
    """One prompt of exactly the given number of tokens each.

    With a tokenizer a prompt starts at the start of a random line of `source_text()`, so that a
    model's continuation means something; without one its ids are uniform over the vocabulary but
    for the reserved ones.

    Raises:
        BadInput: the tokenizer gives too few tokens to make a prompt of, or no id may be drawn.
    """
    if encode is None:
        return [draw_ids(length, vocab_size, reserved, rng) for length in lengths]
    text, starts = source_text(), _line_starts()
    prompts = []
    for length in lengths:
        # Lines that leave room before the end of the text; long prompts begin anywhere and wrap
        # round.
        usable = bisect_right(starts, len(text) - CHARACTERS_PER_TOKEN * length) or len(starts)
        prompts.append(_cut(text, starts[int(rng.integers(usable))], length, encode))
    return prompts


def _cut(text: str, start: int, length: int, encode: Encode) -> tuple[int, ...]:
    characters = CHARACTERS_PER_TOKEN * length + 64
    while characters <= 1024 * (length + 64):
        repeats = -(-(start + characters) // len(text))
        token_ids = encode((text * repeats)[start : start + characters])
        # The last token may differ from what it would be with the text that follows.
        if len(token_ids) > length:
            return tuple(token_ids[:length])
        characters *= 2
    raise BadInput(
        f"the tokenizer made no prompt of {length} tokens out of {characters} characters of text"
    )
