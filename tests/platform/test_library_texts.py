"""Which files of the standard library are for training, and which are held out."""

from __future__ import annotations

from minivllm.platform.library_texts import split_standard_library


def test_no_file_is_on_both_sides() -> None:
    training, held = split_standard_library()
    assert len(training) > 300 and len(held) > 5
    assert not {*training} & {*held}
    stems = {path.stem for path in held if path.stem != "__init__"}
    tests = [path for path in training if "test" in path.parts or "tests" in path.parts]
    assert not [path for path in tests if any(stem in path.stem for stem in stems)]
