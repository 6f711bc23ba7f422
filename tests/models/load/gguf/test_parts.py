"""Split models are read from their first file; a part that is missing or mixed is one line."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minivllm.errors import BadInput
from minivllm.models.load.content import weight_files
from minivllm.models.load.gguf.checkpoint import GGUFCheckpoint
from minivllm.models.load.gguf.config import read_config
from minivllm.models.load.gguf.file import GGUFFile
from minivllm.models.load.gguf.parts import named_parts
from minivllm.models.load.gguf.weights import GGUFWeights
from minivllm.models.load.source import resolve
from tests.damage import damaged
from tests.gguf_files import LLAMA, blocks, tensors, write
from tests.models.test_parity import load

NAMES = [f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """Eleven tensors in three files."""
    path = write(tmp_path / "model.gguf", LLAMA, tensors(), in_each=4)
    assert sorted(part.name for part in tmp_path.iterdir()) == NAMES and path.name == NAMES[0]
    return path


def test_the_parts_are_the_whole_file(first: Path, tmp_path: Path) -> None:
    whole = GGUFFile.open(write(tmp_path / "whole.gguf", LLAMA, tensors()))
    split = GGUFFile.open(first)
    assert [part.path.name for part in (split, *split.others)] == NAMES
    assert {key: (t.dtype, t.shape, t.end - t.begin) for key, t in split.tensors.items()} == {
        key: (t.dtype, t.shape, t.end - t.begin) for key, t in whole.tensors.items()
    }
    assert {t.file.name for t in split.tensors.values()} == {*NAMES}
    one, two = (GGUFWeights(GGUFCheckpoint.open(path)) for path in (first, tmp_path / "whole.gguf"))
    for name, stored in two.checkpoint.tensors.items():
        a, b = torch.full((2, *stored.shape), torch.nan)
        one.fill(name, a)
        two.fill(name, b)
        assert torch.equal(a, b)
    assert one.checkpoint.files == tuple(tmp_path / name for name in NAMES)
    assert load(first).stored_bytes == load(tmp_path / "whole.gguf").stored_bytes
    assert weight_files(first) == [tmp_path / name for name in NAMES]


def test_the_divisors_of_rope_are_of_any_part(tmp_path: Path) -> None:
    waves = [2 * math.pi * 10000 ** (i / 32) for i in range(32)]
    smooth = [min(1.0, max(0.0, (8192 / wave - 1) / 3)) for wave in waves]
    divisors = np.array([1 / ((1 - s) / 8 + s) for s in smooth], np.float32)
    stored = tensors() | {"rope_freqs.weight": (divisors, "F32")}
    path = write(tmp_path / "model.gguf", LLAMA, stored, in_each=4)
    file = GGUFFile.open(path)
    assert file.tensors["rope_freqs.weight"].file.name == NAMES[2]
    scaling = read_config(file)["rope_parameters"]
    assert (scaling["rope_type"], scaling["factor"]) == ("llama3", 8.0)
    (tmp_path / NAMES[2]).write_bytes(b"GGUF")
    with pytest.raises(BadInput, match=f"{NAMES[2]} changed while it was read"):
        read_config(file)


def test_the_fingerprint_is_of_all_parts(first: Path, tmp_path: Path) -> None:
    before = GGUFFile.open(first).fingerprint()
    assert before == GGUFFile.open(first).fingerprint()
    (tmp_path / "other").mkdir()
    changed = tensors() | {"blk.0.ffn_down.weight": (blocks((256, 512), "Q8_0", 99), "Q8_0")}
    other = write(tmp_path / "other" / "model.gguf", LLAMA, changed, in_each=4)
    assert other.read_bytes() == first.read_bytes()
    assert GGUFFile.open(other).fingerprint() != before


def test_a_link_is_followed_by_its_own_name(first: Path, tmp_path: Path) -> None:
    """The hub's cache has links whose ends have other names."""
    cache = tmp_path / "cache"
    cache.mkdir()
    for i, name in enumerate(NAMES):
        (cache / name).symlink_to((tmp_path / name).rename(tmp_path / f"blob{i}"))
    source = resolve({"path": str(cache / NAMES[0])}, False)[1]
    assert source.folder == cache / NAMES[0]


def _missing(folder: Path) -> Path:
    (folder / NAMES[1]).unlink()
    return folder / NAMES[0]


def _second(folder: Path) -> Path:
    return folder / NAMES[1]


def _renamed(folder: Path) -> Path:
    return (folder / NAMES[0]).rename(folder / "first.gguf")


def _swapped(folder: Path) -> Path:
    shutil.copy(folder / NAMES[2], folder / NAMES[1])
    return folder / NAMES[0]


def _of_another(folder: Path) -> Path:
    (folder / "other").mkdir()
    write(folder / "other" / "model.gguf", LLAMA, dict(list(tensors().items())[:10]), in_each=4)
    shutil.copy(folder / "other" / NAMES[2], folder / NAMES[2])
    return folder / NAMES[0]


def _whole_file(folder: Path) -> Path:
    shutil.copy(write(folder / "whole.gguf", LLAMA, tensors()), folder / NAMES[2])
    return folder / NAMES[0]


def _same_tensors(folder: Path) -> Path:
    (folder / "other").mkdir()
    reverse = dict(list(tensors().items())[::-1])
    write(folder / "other" / "model.gguf", LLAMA, reverse, in_each=4)
    shutil.copy(folder / "other" / NAMES[1], folder / NAMES[1])
    shutil.copy(folder / "other" / NAMES[2], folder / NAMES[2])
    return folder / NAMES[0]


def _cut_off(folder: Path) -> Path:
    content = (folder / NAMES[2]).read_bytes()
    (folder / NAMES[2]).write_bytes(content[:-200])
    return folder / NAMES[0]


WRONG: dict[Callable[[Path], Path], str] = {
    _missing: "is the first of 3 parts, of which model-00002-of-00003.gguf is missing (1 such)",
    _second: "is part 2 of a split model: give the first, model-00001-of-00003.gguf",
    _renamed: "found by their names: call it NAME-00001-of-00003.gguf",
    _swapped: "are [2, 3, 11] and not [1, 3, 11]",
    _of_another: "are [2, 3, 10] and not [2, 3, 11]",
    _whole_file: "are [None, None, None] and not [2, 3, 11]",
    _same_tensors: "and another part of model-00001-of-00003.gguf have tensor",
    _cut_off: "bytes where tensor",
}


@pytest.mark.parametrize("change", WRONG, ids=lambda change: change.__name__)
def test_what_is_wrong_is_one_line_that_names_it(
    change: Callable[[Path], Path], first: Path
) -> None:
    path = change(first.parent)
    with pytest.raises(BadInput) as raised:
        resolve({"path": str(path)}, False)
    assert WRONG[change] in str(raised.value) and "\n" not in str(raised.value)
    assert "model-0000" in str(raised.value) or "first.gguf" in str(raised.value)


def test_a_file_that_is_whole_may_have_such_a_name(tmp_path: Path) -> None:
    path = write(tmp_path / NAMES[0], LLAMA, tensors())
    assert len(named_parts(path)) == 3 and weight_files(path) == [path]
    assert GGUFFile.open(path).others == ()


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_any_damage_of_a_part_is_a_model_or_one_line(first: Path, data: st.DataObject) -> None:
    part = first.with_name(NAMES[data.draw(st.integers(0, 2))])
    content = part.read_bytes()
    try:
        part.write_bytes(data.draw(damaged(content)))
        # Without its split.count the first part is a file of its own.
        assert len(GGUFFile.open(first).tensors) <= 11
    except BadInput as error:
        assert "\n" not in str(error) and "model-0000" in str(error)
    finally:
        part.write_bytes(content)
