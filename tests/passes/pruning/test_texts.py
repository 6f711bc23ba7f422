"""The text that pruning is calibrated on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from minivllm.config.compose import compose
from minivllm.errors import BadInput
from minivllm.experiments.preflight import check
from minivllm.models.load.source import EMBEDDED
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.passes.pruning import texts
from minivllm.passes.pruning.options import CalibrationOptions

HELD_OUT = (EMBEDDED / "heldout.txt").read_text()


def never() -> Iterable[Sequence[int]]:
    raise AssertionError("no workload is asked for")


def calibration_ids(
    options: CalibrationOptions,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    longest: int,
    prompts: texts.Prompts = never,
) -> list[list[int]]:
    return texts.calibration_ids(options, tokenizer, vocab_size, longest, prompts, HELD_OUT)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = Tokenizer.load(EMBEDDED)
    assert found is not None
    return found


def test_windows_of_the_standard_library(tokenizer: Tokenizer) -> None:
    options = CalibrationOptions(calibration_tokens=1300)
    windows = calibration_ids(options, tokenizer, 6144, 2048)
    assert [len(one) for one in windows] == [512, 512, 276]
    assert windows == calibration_ids(options, tokenizer, 6144, 2048)
    assert not any(tokenizer.decode(one[8:40]) in HELD_OUT for one in windows)


def test_a_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("def main(): pass\n" * 40)
    windows = calibration_ids(
        CalibrationOptions(calibration=str(path), calibration_tokens=100), tokenizer, 6144, 30
    )
    assert [len(one) for one in windows] == [30, 30, 30, 10]
    with pytest.raises(BadInput, match="calibration_tokens=8192"):
        calibration_ids(CalibrationOptions(calibration=str(path)), tokenizer, 6144, 512)
    with pytest.raises(BadInput, match="no such file"):
        calibration_ids(CalibrationOptions(calibration="nowhere.txt"), tokenizer, 6144, 512)


@pytest.mark.parametrize("pruning", ["layers", "width", "wanda"])
def test_a_file_that_is_not_there_is_told_before_anything_is_loaded(pruning: str) -> None:
    with pytest.raises(BadInput, match=r"pruning\.calibration=nowhere\.txt: no such file"):
        check(compose([f"pruning={pruning}", "pruning.calibration=nowhere.txt"]))


def test_wide_tokens_take_as_much_text_as_they_need(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "wide.txt"
    path.write_text(" " * 200_000 + "def main(): pass\n" * 2000)
    options = CalibrationOptions(calibration=str(path), calibration_tokens=4000)
    assert sum(map(len, calibration_ids(options, tokenizer, 6144, 512))) == 4000


def test_without_a_tokenizer_ids_are_random_and_none_is_reserved() -> None:
    """The first id may be a special one, and a model says which ones end an answer."""
    options = CalibrationOptions(calibration_tokens=512)
    (window,) = texts.calibration_ids(options, None, 50, 512, never, HELD_OUT, (7, 49))
    assert len(window) == 512 and {*window} == {*range(50)} - {0, 7, 49}


def test_prompts_are_cut_into_windows_of_their_own(tokenizer: Tokenizer) -> None:
    options = CalibrationOptions(calibration="workload", calibration_tokens=64)
    prompts = [range(600, 640), range(700, 710), range(800, 900)]
    windows = calibration_ids(options, tokenizer, 6144, 30, lambda: prompts)
    assert windows == [
        [*range(600, 630)],
        [*range(630, 640)],
        [*range(700, 710)],
        [*range(800, 814)],
    ]
    with pytest.raises(BadInput, match=r"calibration=workload has 50 tokens, and .*_tokens=64$"):
        calibration_ids(options, tokenizer, 6144, 512, lambda: prompts[:2])


def test_the_held_out_text_is_refused_wherever_it_comes_from(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "text.txt"
    path.write_text("def main(): pass\n" * 30 + HELD_OUT[777:9000])
    options = CalibrationOptions(calibration=str(path), calibration_tokens=64)
    assert calibration_ids(options, tokenizer, 6144, 512)  # as it begins well
    longer = CalibrationOptions(calibration=str(path), calibration_tokens=1000)
    with pytest.raises(BadInput, match=r"text\.txt: \d+ % of it is in the held-out text"):
        calibration_ids(longer, tokenizer, 6144, 512)
    ids = tokenizer.encode(HELD_OUT[1000:2000])
    drawn = CalibrationOptions(calibration="workload", calibration_tokens=64)
    with pytest.raises(BadInput, match="use workload=file or stdlib"):
        calibration_ids(drawn, tokenizer, 6144, 512, lambda: [ids])
    assert calibration_ids(drawn, None, 6144, 512, lambda: [ids])  # ids alone are no text


def test_no_file_is_on_both_sides() -> None:
    training, held = texts.split_standard_library()
    assert len(training) > 300 and len(held) > 5
    assert not {*training} & {*held}
    stems = {path.stem for path in held if path.stem != "__init__"}
    tests = [path for path in training if "test" in path.parts or "tests" in path.parts]
    assert not [path for path in tests if any(stem in path.stem for stem in stems)]
