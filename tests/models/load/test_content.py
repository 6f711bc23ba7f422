"""The digest of weights is of all their bytes, and is made once for each state of the files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from minivllm.models.load import content
from minivllm.models.load.checkpoint import Checkpoint
from minivllm.models.load.content import content_digest
from minivllm.models.load.source import resolve

BIG = 1 << 16


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def saved(folder: Path) -> Path:
    """A folder with the embedded model, of its own bytes."""
    folder.mkdir()
    source = resolve({"path": "embedded", "weights": "auto"}, allow_random=False)[1].folder
    assert source is not None
    for file in source.iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_bytes_that_the_fingerprint_does_not_look_at_change_the_digest(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    (file,) = content.weight_files(folder)
    before, fingerprint = content_digest(folder), Checkpoint.open(folder).fingerprint()
    state = os.stat(file)
    held = bytearray(file.read_bytes())
    tensor = max(Checkpoint.open(folder).tensors.values(), key=lambda one: one.end - one.begin)
    assert tensor.end - tensor.begin > BIG
    held[tensor.begin + 4096 : tensor.end] = bytes(tensor.end - tensor.begin - 4096)
    file.write_bytes(held)
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))  # as some copies keep it
    assert Checkpoint.open(folder).fingerprint() == fingerprint
    assert before is not None and content_digest(folder) not in (before, None)


def test_the_same_bytes_have_one_digest_wherever_they_lie(tmp_path: Path) -> None:
    first, second = saved(tmp_path / "a"), saved(tmp_path / "b")
    assert content_digest(first) == content_digest(second) is not None


def test_bytes_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "model")
    first = content_digest(folder)
    monkeypatch.setattr(content, "_digest", lambda found: "again")
    assert content_digest(folder) == first
    (kept,) = (tmp_path / "cache" / "minivllm" / "digests").iterdir()
    kept.write_text("cut")  # no digest
    assert content_digest(folder) == "again"


def test_without_weights_or_a_cache_there_is_no_error(tmp_path: Path) -> None:
    assert content_digest(None) is None is content_digest(tmp_path)
    assert content_digest(tmp_path / "none") is None
    (tmp_path / "cache").write_text("no folder")
    assert content_digest(saved(tmp_path / "model")) is not None
