"""Keys and values in a message or in a file: they arrive whole or not at all, and no file stays."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from minivllm.errors import BadInput
from minivllm.parallel.handover import (
    Handover,
    HandoverFailed,
    Stored,
    drop,
    make_folder,
    taken,
)
from minivllm.parallel.options import ParallelOptions

CONTENT = bytes(range(256)) * 8
BY_FILE = ParallelOptions(replicas=2, disaggregated=True, handover="file")


def given(folder: Path, content: bytes = CONTENT) -> Stored:
    stored = Handover(str(folder)).give(content)
    assert isinstance(stored, Stored)
    return stored


def test_what_was_given_is_taken_once(tmp_path: Path) -> None:
    assert Handover().give(CONTENT) is CONTENT and taken(CONTENT, 2048) is CONTENT
    assert Handover(str(tmp_path)).give(b"") == b""  # no full block
    stored, other = given(tmp_path), given(tmp_path)
    assert sorted(map(str, tmp_path.iterdir())) == sorted((stored.path, other.path))
    assert taken(stored, 2048) == CONTENT and list(tmp_path.iterdir()) == [Path(other.path)]
    with pytest.raises(HandoverFailed, match=r"cannot be read \(No such file"):
        taken(stored, 2048)
    drop(other)
    drop(other)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("by_file", [False, True])
def test_what_is_larger_than_its_prompt_is_not_read(tmp_path: Path, by_file: bool) -> None:
    content = given(tmp_path) if by_file else CONTENT
    with pytest.raises(HandoverFailed, match=r"2048 bytes .* have 2047: the replicas differ"):
        taken(content, 2047)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("there", [b"", CONTENT[1:], CONTENT + b"a", CONTENT[:-1] + b"a"])
def test_a_damaged_file_is_told_and_deleted(tmp_path: Path, there: bytes) -> None:
    stored = given(tmp_path)
    Path(stored.path).write_bytes(there)
    with pytest.raises(HandoverFailed, match="is not what was written"):
        taken(stored, 2048)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(path: Path, content: bytes) -> int:
        with path.open("wb") as file:
            file.write(content[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", fill)
    with pytest.raises(HandoverFailed, match=r"No space left on device\); free space there, or"):
        given(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_gone_is_named_and_not_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    with pytest.raises(HandoverFailed, match=rf"{folder} \(No such file .*cache\.offload_dir"):
        given(folder)
    assert not folder.exists()


def test_what_a_dead_replica_told_nobody_is_deleted(tmp_path: Path) -> None:
    first, second = (Handover(str(tmp_path), number) for number in (1, 11))
    known, others = first.give(CONTENT), second.give(CONTENT)
    first.give(CONTENT)
    (tmp_path / ".1-ab.cd.tmp").touch()  # begun
    assert isinstance(known, Stored) and isinstance(others, Stored)
    first.remove_all_but([known])
    assert {str(path) for path in tmp_path.iterdir()} == {known.path, others.path}
    Handover().remove_all_but([])


def test_the_folder_ends_with_what_is_in_it(tmp_path: Path) -> None:
    folder = make_folder(BY_FILE, {"offload_dir": str(tmp_path)})
    assert folder is not None
    given(Path(folder.path))
    folder.close()
    folder.close()
    assert not list(tmp_path.iterdir())
    assert make_folder(ParallelOptions(), {}) is None


def test_a_folder_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    with pytest.raises(BadInput, match=rf"cache\.offload_dir={missing} \(No such file"):
        make_folder(BY_FILE, {"offload_dir": missing})
    on_ray = ParallelOptions(replicas=2, disaggregated=True, handover="file", backend="ray")
    with pytest.raises(BadInput, match=r"may be on other machines.*cache\.offload_dir"):
        make_folder(on_ray, {"offload_dir": None})
