"""The keeper knows only the standard library, as a process of its own."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from pathlib import Path

import psutil

from minivllm.engines.servers import keeper
from tests.engines.servers.waiting import wait_until


def keep(folder: Path) -> None:
    """Keep a server that cannot start."""
    command = (sys.executable, "-c", "print('no GPU found'); raise SystemExit(3)")
    words = [sys.executable, "-I", keeper.__file__, str(folder), "60", "0", "1", *command]
    subprocess.run(words, timeout=60, check=False)


def test_a_server_that_cannot_start_leaves_its_words_to_who_waits(tmp_path: Path) -> None:
    with (tmp_path / keeper.LEASE).open("ab") as lease:
        fcntl.flock(lease, fcntl.LOCK_SH)
        keep(tmp_path)
        assert not (tmp_path / keeper.STATE).exists()
        assert (tmp_path / keeper.LOG).read_text() == "no GPU found\n"
    keep(tmp_path)
    assert not tmp_path.exists(), "nobody uses it"


def test_a_server_that_nobody_uses_is_suspended_and_still_ends_with_its_keeper(
    tmp_path: Path,
) -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    command = (sys.executable, "-c", child)
    kept = subprocess.Popen(
        [sys.executable, "-I", keeper.__file__, str(tmp_path), "600", "0", "1", *command]
    )
    busy = None
    try:
        assert wait_until((tmp_path / keeper.STATE).exists)
        state = json.loads((tmp_path / keeper.STATE).read_text())
        server = psutil.Process(state["server"])
        assert wait_until(lambda: server.status() == psutil.STATUS_STOPPED)
        with (tmp_path / keeper.LEASE).open("ab") as lease:
            fcntl.flock(lease, fcntl.LOCK_SH)
            assert wait_until(lambda: server.status() != psutil.STATUS_STOPPED)
            assert wait_until(lambda: bool(server.children())), "it was not resumed"
            (busy,) = server.children()
            assert busy.status() != psutil.STATUS_STOPPED
        assert wait_until(lambda: busy.status() == psutil.STATUS_STOPPED), "not all processes"
        kept.kill()
        assert wait_until(lambda: not server.is_running() and not busy.is_running())
    finally:
        kept.kill()
        if busy is not None and busy.is_running():  # or it would be busy for ever
            busy.kill()
