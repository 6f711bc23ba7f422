"""The keeper knows only the standard library, as a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from minivllm.bench.targets.servers import keeper


def test_a_server_that_cannot_start_leaves_no_state(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "print('no GPU found'); raise SystemExit(3)")
    words = [sys.executable, "-I", keeper.__file__, str(tmp_path), "60", "0", *command]
    subprocess.run(words, timeout=60, check=False)
    assert not (tmp_path / keeper.STATE).exists()
    assert (tmp_path / keeper.LOG).read_text() == "no GPU found\n"
