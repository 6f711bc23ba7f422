"""Token ids of the texts that pruning is calibrated on."""

from __future__ import annotations

import hashlib
import random
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from minivllm.errors import BadInput
from minivllm.models.load.reserved_ids import reserved_ids
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.passes.pruning.options import STDLIB, WORKLOAD, CalibrationOptions
from minivllm.platform.untrusted import MAX_TEXT, place, read_text

WINDOW = 512  # tokens
PART = 1 << 16  # characters
SEED = 0  # of the order of files, and of token ids where there is no tokenizer
PIECE = 64  # characters that are looked for in the held-out text
MOST_HELD_OUT = 0.01  # of the pieces: a licence's lines may be in any text
# Generated tables and fixtures teach a language model nothing about Python.
SKIPPED_PARTS = {"site-packages", "encodings", "__pycache__", "lib2to3", "cjkencodings", "msilib"}

Prompts = Callable[[], Iterable[Sequence[int]]]  # of the workload, made when they are needed


def text_file(options: CalibrationOptions) -> Path | None:
    """The file of the calibration text; None where the text is in none. Raises BadInput where it is
    not there."""
    if options.calibration in (STDLIB, WORKLOAD):
        return None
    where = f"pruning.calibration={options.calibration}"
    path = place(options.calibration, where)
    if not path.is_file():
        raise BadInput(f"{where}: no such file; give a text file, UTF-8, stdlib or workload")
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


def _of_texts(options: CalibrationOptions, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Token ids of the texts, each as one sequence with the others."""
    ids: list[int] = []
    for part in _parts(options):
        ids += tokenizer.encode(part)
        if len(ids) >= options.calibration_tokens:
            break
    yield ids


def calibration_ids(
    options: CalibrationOptions,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    longest: int,
    prompts: Prompts,
    held_out: str,
    eos_token_ids: Iterable[int] = (),
) -> list[list[int]]:
    """Windows of token ids, `options.calibration_tokens` in all.

    Args:
        options: which text, and how much of it.
        tokenizer: of the model; without one the ids of a text are random.
        vocab_size: of the model.
        longest: most tokens of a window.
        prompts: of the workload.
        held_out: the text that quality is measured on.
        eos_token_ids: of the model, which random ids leave out with the other reserved ones.

    Raises:
        BadInput: the text is not there, too short, or held out.
    """
    wanted, window = options.calibration_tokens, min(WINDOW, longest)
    sequences: Iterable[Sequence[int]]
    if options.calibration == WORKLOAD:
        sequences = prompts()
    elif tokenizer is None:
        reserved = {*chain.from_iterable(reserved_ids(None, eos_token_ids, vocab_size))}
        drawn = [token for token in range(vocab_size) if token not in reserved]
        sequences = [random.Random(SEED).choices(drawn, k=wanted)]
    else:
        sequences = _of_texts(options, tokenizer)
    windows, count = [], 0
    for ids in sequences:
        taken = list(ids[: wanted - count])
        windows += [taken[start : start + window] for start in range(0, len(taken), window)]
        count += len(taken)
    if count < wanted:
        raise BadInput(
            f"pruning.calibration={options.calibration} has {count} tokens, and "
            f"pruning.calibration_tokens={wanted}"
        )
    if tokenizer is not None and options.calibration != STDLIB:
        require_not_held_out(options, map(tokenizer.decode, windows), held_out)
    return windows


def require_not_held_out(options: CalibrationOptions, texts: Iterable[str], held_out: str) -> None:
    """Raise BadInput for texts of which a part is in the held-out text, whose quality would then
    say too much of the pruned model."""
    pieces = [
        piece
        for text in texts
        for start in range(0, len(text), PIECE)
        if len((piece := text[start : start + PIECE]).split()) > 1
    ]
    known = sum(piece in held_out for piece in pieces)
    if known > MOST_HELD_OUT * len(pieces):
        advice = (
            "generated prompts with a tokenizer are; use workload=file or stdlib"
            if options.calibration == WORKLOAD
            else "use another text, or stdlib"
        )
        share = 100 * known / len(pieces)
        raise BadInput(
            f"pruning.calibration={options.calibration}: {share:.0f} % of it is in the held-out "
            f"text that quality is measured on ({advice})"
        )


def split_standard_library() -> tuple[list[Path], list[Path]]:
    """(training files, held-out files) of this interpreter's standard library, whose sources every
    machine has (PSF licence).

    The split is by file, decided by a hash of its path, so that it is the same on every machine.
    Test files are trained on only when the module they test is not held out.
    """
    root = Path(sysconfig.get_path("stdlib"))
    library: list[Path] = []
    tests: list[Path] = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if SKIPPED_PARTS & set(parts) or path.stat().st_size < 200:
            continue
        (tests if "test" in parts or "tests" in parts or "idle_test" in parts else library).append(
            path
        )

    def held_out(path: Path) -> bool:
        digest = hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()
        # About 4 % of the files, none so large that it would be most of the sample.
        return digest[0] < 10 and path.stat().st_size < 100_000

    held = [path for path in library if held_out(path)]
    stems = {path.stem for path in held if path.stem != "__init__"} | {
        path.parent.name for path in held if path.stem == "__init__"
    }
    training = [path for path in library if not held_out(path)]
    training += [path for path in tests if not any(stem in path.stem for stem in stems)]
    return training, held
