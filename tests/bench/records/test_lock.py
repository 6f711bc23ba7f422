"""Locks: whoever waits is told for whom, and what is in the way of a lock file is named in one
line."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest

from minivllm.bench.device_lock import device_lock
from minivllm.bench.records.lock import HolderLock, folder_lock
from minivllm.errors import BadInput

CPU = {"runtime": {"device": "cpu"}, "engine": {"_target_": "some.Engine"}}


def test_the_file_says_who_holds_it_and_since_when(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    first, second = HolderLock(path, "x"), HolderLock(path, "x")
    assert first.acquire() and not second.acquire()
    said = json.loads(path.read_text())
    assert said["pid"] == os.getpid() and said["command"] and said["started"].endswith("+00:00")
    told = f"process {os.getpid()} ({said['command']}), since {said['started'].replace('T', ' ')}"
    assert second.holder() == told
    first.release()
    assert second.acquire() and second.holder()
    second.release()
    assert second.holder() == "" and path.read_text() == ""


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": "x"}', b"\xff" * 9000])
def test_a_file_that_does_not_say_is_no_matter(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.lock"
    path.write_bytes(content)
    lock = HolderLock(path, "x")
    assert lock.holder() == "" and lock.acquire()
    lock.release()


@pytest.mark.parametrize("kind", ["folder", "link", "dangling link", "pipe"])
def test_what_is_in_the_way_of_the_devices_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path, other = tmp_path / "minivllm-cpu.lock", tmp_path / "other"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(other)
        if kind == "link":
            other.write_text("mine")
    with (
        pytest.raises(BadInput, match=r"runtime.device=cpu: .*minivllm-cpu\.lock is in the way"),
        device_lock(CPU),
    ):
        pass
    assert not other.exists() or other.read_text() == "mine"


def test_a_lock_file_that_may_not_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def denied(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("filelock.FileLock.acquire", denied)
    with pytest.raises(BadInput, match=r"cannot be used \(Permission denied\)"), device_lock(CPU):
        pass


def test_whoever_waits_for_a_device_is_told_for_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    held = HolderLock(tmp_path / "minivllm-cpu.lock", "x")
    held.acquire()
    holders: list[str] = []

    def waiting(holder: str) -> None:
        holders.append(holder)
        held.release()

    with device_lock(CPU, waiting):
        assert holders[0].startswith(f"process {os.getpid()} (")


def test_a_folder_is_held_by_one_and_removed_where_nothing_came_into_it(tmp_path: Path) -> None:
    with folder_lock(tmp_path / "mine", "run", "name"):
        with (
            pytest.raises(
                BadInput, match=rf"run mine is running in another process: process {os.getpid()} "
            ),
            folder_lock(tmp_path / "mine", "run", "name"),
        ):
            pass
        assert (tmp_path / "mine").exists()
    assert not (tmp_path / "mine").exists()
    with folder_lock(tmp_path / "mine", "run", "name"):
        (tmp_path / "mine" / "record").write_text("")
    assert (tmp_path / "mine" / "record").exists()
