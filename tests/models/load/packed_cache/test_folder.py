"""The folder's size, order of use, leftovers and lock."""

from __future__ import annotations

import os
import shutil
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import filelock
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.errors import BadInput
from minivllm.models.load.packed_cache.folder import LOCK, CacheFolder, entry_name


def name(number: int) -> str:
    return entry_name("model-int8", f"{number:032x}")


def add(folder: CacheFolder, entry: str, size: int) -> str | None:
    return folder.add(entry, size, lambda path: path.write_bytes(b"x" * size) and None)


@given(
    limit=st.integers(1, 12),
    steps=st.lists(
        st.tuples(st.sampled_from(["add", "find"]), st.integers(0, 5), st.integers(1, 6)),
        max_size=25,
    ),
)
def test_what_was_not_used_for_the_longest_time_is_removed(
    limit: int, steps: list[tuple[str, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("cache")
    folder, held = CacheFolder(path, limit), OrderedDict[str, int]()
    (path / "weights.safetensors").write_bytes(b"a user's own")
    for tick, (action, number, size) in enumerate(steps):
        entry = name(number)
        if action == "find":
            assert (folder.find(entry) is not None) == (entry in held)
        else:
            assert (add(folder, entry, size) is None) == (size <= limit)
            if size <= limit:
                held[entry] = size
                while sum(held.values()) > limit:
                    held.pop(next(one for one in held if one != entry))
        if entry in held and (action == "find" or size <= limit):
            held.move_to_end(entry)
            os.utime(path / entry, (tick, tick))  # a clock that goes on
        assert [file.name for file in folder.entries()] == list(held)
    assert (path / "weights.safetensors").read_bytes() == b"a user's own"


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path, 100)

    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    reason = folder.add(name(1), 10, fail)
    assert reason is not None and "No space left" in reason
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    assert add(folder, name(1), 10) is None


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / f".{name(1)}.abc123.tmp"
    left.write_bytes(b"half")
    own = tmp_path / ".other.tmp"
    own.write_bytes(b"a user's own")
    folder = CacheFolder(tmp_path, 100)
    assert folder.find(name(1)) is None
    assert add(folder, name(2), 10) is None
    assert not left.exists() and own.exists()


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    folder = CacheFolder(tmp_path, 100)
    with filelock.FileLock(tmp_path / LOCK):
        assert add(folder, name(1), 10) == "another process is writing to the folder"
        assert folder.find(name(1)) is None
    assert add(folder, name(1), 10) is None


def test_a_full_disk_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=15))
    folder = CacheFolder(tmp_path, 100)
    assert add(folder, name(1), 7) is None
    assert "the disk has 15 bytes free" in str(add(folder, name(2), 8))


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"model.packed_cache=.*file/cache cannot be made"):
        CacheFolder(tmp_path / "file" / "cache", 100).require_usable("model.packed_cache")
    assert "Not a directory" in str(add(CacheFolder(tmp_path / "file" / "cache", 100), name(1), 1))
