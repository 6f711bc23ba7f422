"""scripts/leftovers.py."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import psutil
import pytest

from tests.scripts.load import load_script

leftovers = load_script("leftovers")
ORPHAN = """
import subprocess, sys
sys.path.insert(0, {folder!r})
import leftovers
leftovers.adopt_orphans()
subprocess.run([sys.executable, "-c", {parent!r}])
print(len(leftovers.family("sleeper")))
for one in leftovers.family("sleeper"):
    one.kill()
"""
PARENT = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)", "sleeper"])
"""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(leftovers, "GONE_S", 0.0)
    return tmp_path


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_that_is_left_is_found(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError as error:
        pytest.skip(f"{host}: {error}")
    with listener:
        ports = leftovers.ports_of([psutil.Process()])
        assert listener.getsockname()[1] in ports
        with pytest.raises(AssertionError, match="ports are left"):
            leftovers.assert_nothing_is_left(set(leftovers.family()), ports)
        ports = {listener.getsockname()[1]}
    leftovers.assert_nothing_is_left(set(leftovers.family()), ports)


def test_folders_and_processes_that_are_left_are_found(folder: Path) -> None:
    before = set(leftovers.family())
    (folder / "minivllm-ranks-x").mkdir()
    with pytest.raises(AssertionError, match="folders are left"):
        leftovers.assert_nothing_is_left(before, set())
    with subprocess.Popen(["sleep", "3600"]) as process:
        with pytest.raises(AssertionError, match="processes are left"):
            leftovers.assert_nothing_is_left(before, set())
        process.kill()


def test_shared_memory_that_is_left_is_found() -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir():
        pytest.skip("there is none")
    path, before = memory / f"test-{uuid.uuid4().hex}", leftovers.shared_memory()
    path.touch()
    try:
        with pytest.raises(AssertionError, match=path.name):
            leftovers.until_none(lambda: leftovers.shared_memory() - before, "names")
    finally:
        path.unlink()


def test_an_orphan_is_one_of_the_family() -> None:
    folder = str(Path(leftovers.__file__).parent)
    code = ORPHAN.format(folder=folder, parent=PARENT)
    assert subprocess.check_output([sys.executable, "-c", code], timeout=60).strip() == b"1"
