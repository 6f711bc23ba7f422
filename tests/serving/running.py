"""A server of its own process, as users start it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from minivllm.platform.children import module_path

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class RunningServer:
    """A server that listens."""

    url: str  # without /v1
    process: subprocess.Popen[str]

    def stop(self) -> int:
        """End it by SIGTERM; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextlib.contextmanager
def serving(*overrides: str, log: Path | None = None) -> Iterator[RunningServer]:
    """Run `preset=serve` with these overrides until the block ends."""
    words = ["preset=serve", "task.port=0", "runtime.threads=1", "runtime.device=cpu", *overrides]
    with contextlib.ExitStack() as stack:
        errors = stack.enter_context(log.open("w")) if log is not None else subprocess.DEVNULL
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "run.py"), *words],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "PYTHONPATH": module_path(), "HF_HUB_OFFLINE": "1"},
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"http://\S+?(?=/v1)", line)
            assert found, f"it did not start: {line}"
            yield RunningServer(found.group(), process)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
