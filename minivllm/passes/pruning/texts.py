"""Token ids of the text that pruning is calibrated on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from minivllm.errors import BadInput
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.passes.pruning.options import CalibrationOptions
from minivllm.platform.library_texts import split_standard_library
from minivllm.platform.untrusted import MAX_TEXT, place, read_text

WINDOW = 512  # tokens
PART = 1 << 16  # characters
SEED = 0  # of the order of files, and of token ids where there is no tokenizer


def text_file(options: CalibrationOptions) -> Path | None:
    """The file of the calibration text; None for the standard library. Raises BadInput where it is
    not there."""
    if options.calibration == "stdlib":
        return None
    where = f"pruning.calibration={options.calibration}"
    path = place(options.calibration, where)
    if not path.is_file():
        raise BadInput(f"{where}: no such file; give a text file, UTF-8, or stdlib")
    return path


def _texts(options: CalibrationOptions) -> Iterator[str]:
    """Texts, one after another.

    Raises:
        BadInput: the file is not there, or not UTF-8.
    """
    if (path := text_file(options)) is not None:
        yield read_text(path, MAX_TEXT, f"pruning.calibration={options.calibration}")
        return
    training, _ = split_standard_library()  # never a held-out file
    random.Random(SEED).shuffle(training)
    for path in training:
        yield path.read_text(encoding="utf-8", errors="ignore")


def _parts(options: CalibrationOptions) -> Iterator[str]:
    """The texts in parts, so that no more of a long one is encoded than is needed."""
    for text in _texts(options):
        for start in range(0, len(text), PART):
            yield text[start : start + PART]


def calibration_ids(
    options: CalibrationOptions, tokenizer: Tokenizer | None, vocab_size: int, longest: int
) -> list[list[int]]:
    """Windows of token ids, `options.calibration_tokens` in all.

    Args:
        options: which text, and how much of it.
        tokenizer: of the model; without one the ids are random.
        vocab_size: of the model.
        longest: most tokens of a window.

    Raises:
        BadInput: the text is not there or too short.
    """
    wanted, window = options.calibration_tokens, min(WINDOW, longest)
    if tokenizer is None:
        draw = random.Random(SEED)
        ids = [draw.randrange(vocab_size) for _ in range(wanted)]
    else:
        ids = []
        for part in _parts(options):
            ids += tokenizer.encode(part)
            if len(ids) >= wanted:
                break
        if len(ids) < wanted:
            raise BadInput(
                f"pruning.calibration={options.calibration} has {len(ids)} tokens, and "
                f"pruning.calibration_tokens={wanted}"
            )
    return [ids[start : min(start + window, wanted)] for start in range(0, wanted, window)]
