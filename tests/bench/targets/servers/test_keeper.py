"""The keeper knows only the standard library, as a process of its own."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

from minivllm.bench.targets.servers import keeper


def keep(folder: Path) -> None:
    """Keep a server that cannot start."""
    command = (sys.executable, "-c", "print('no GPU found'); raise SystemExit(3)")
    words = [sys.executable, "-I", keeper.__file__, str(folder), "60", "0", *command]
    subprocess.run(words, timeout=60, check=False)


def test_a_server_that_cannot_start_leaves_its_words_to_who_waits(tmp_path: Path) -> None:
    with (tmp_path / keeper.LEASE).open("ab") as lease:
        fcntl.flock(lease, fcntl.LOCK_SH)
        keep(tmp_path)
        assert not (tmp_path / keeper.STATE).exists()
        assert (tmp_path / keeper.LOG).read_text() == "no GPU found\n"
    keep(tmp_path)
    assert not tmp_path.exists(), "nobody uses it"
