"""Temporary folders: none stays, however the process ends that has made it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minivllm.errors import BadInput
from minivllm.platform.folders import TemporaryFolder, new_folder


def await_nothing(folder: Path) -> None:
    """Wait until a folder is empty."""
    end = time.monotonic() + 30
    while list(folder.iterdir()) and time.monotonic() < end:
        time.sleep(0.01)
    assert not list(folder.iterdir())


def test_the_folder_ends_with_what_is_in_it(tmp_path: Path) -> None:
    folder = TemporaryFolder("some-", str(tmp_path))
    (place,) = tmp_path.iterdir()
    assert str(place) == folder.path and place.name.startswith("some-")
    assert place.stat().st_mode & 0o777 == 0o700
    (place / "below").mkdir()
    (place / "below" / "file").write_text("text")
    folder.close()
    folder.close()
    assert not list(tmp_path.iterdir())
    with pytest.raises(RuntimeError), TemporaryFolder("other-", str(tmp_path)) as path:
        assert Path(path).is_dir()
        raise RuntimeError
    assert not list(tmp_path.iterdir())


def test_what_was_renamed_stays(tmp_path: Path) -> None:
    with TemporaryFolder(".made.", str(tmp_path)) as path:
        os.replace(path, tmp_path / "made")
    assert list(tmp_path.iterdir()) == [tmp_path / "made"]


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        TemporaryFolder("some-", str(tmp_path / "missing"))


def test_nothing_is_left_where_no_process_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise BlockingIOError

    monkeypatch.setattr(subprocess, "Popen", full)
    with pytest.raises(BlockingIOError):
        TemporaryFolder("some-", str(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("writes_on", [False, True])
def test_the_folder_of_a_killed_process_is_removed(tmp_path: Path, writes_on: bool) -> None:
    """A kill of the whole group, as by the supervisor of a benchmark; a process of another one
    may write into the folder for as long as it is there."""
    script = (
        "import pathlib, subprocess, sys; from minivllm.platform.folders import TemporaryFolder; "
        "folder = TemporaryFolder('some-', sys.argv[1]).path; "
        "subprocess.Popen([sys.executable, '-c', sys.argv[2], folder], "
        "start_new_session=True, stderr=subprocess.DEVNULL); "
        "sys.stdin.read()"
    )
    writer = (
        "import itertools, os, sys, time; end = time.monotonic() + 0.5; os.write(1, b'ready\\n')\n"
        "for number in itertools.count():\n"
        "    open(f'{sys.argv[1]}/{number}', 'w').close()\n"
        "    if time.monotonic() > end: break"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), writer if writes_on else "print('ready')"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    with process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        assert list(tmp_path.iterdir())
        os.killpg(process.pid, signal.SIGKILL)
    await_nothing(tmp_path)


def test_a_new_folder_is_there_when_it_is_complete(tmp_path: Path) -> None:
    output = tmp_path / "below" / "made"
    with new_folder(output) as folder:
        (folder / "file").write_text("text")
        assert not output.exists()
    assert (output / "file").read_text() == "text" and output.stat().st_mode & 0o777 != 0o700
    assert list((tmp_path / "below").iterdir()) == [output]
    with (
        pytest.raises(BadInput, match="made exists already: give a new folder"),
        new_folder(output),
    ):
        raise AssertionError


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device"), "out=x cannot be written: No space left"),
        (OSError("full"), "out=x cannot be written: full"),
        (BadInput("FOLDER/file is wrong"), r"^\S+/made/file is wrong"),
    ],
)
def test_nothing_is_left_of_a_new_folder_after_an_error(
    error: Exception, message: str, tmp_path: Path
) -> None:
    with (
        pytest.raises(BadInput, match=message) as caught,
        new_folder(tmp_path / "made", "out=x") as folder,
    ):
        raise type(error)(*(str(a).replace("FOLDER", str(folder)) for a in error.args))
    assert not list(tmp_path.iterdir()) and ".made." not in str(caught.value)


def test_a_new_folder_needs_room(tmp_path: Path) -> None:
    with (
        pytest.raises(BadInput, match=r"made: .* will be written, and .* are free there"),
        new_folder(tmp_path / "made", needed=1 << 60),
    ):
        raise AssertionError
    assert not list(tmp_path.iterdir())
