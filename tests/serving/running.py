"""A server of its own process, as users start it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from minivllm.platform.processes.children import module_path
from tests.forked import popen
from tests.serving.raw import ask

ROOT = Path(__file__).resolve().parents[2]
KEY = "a-key-of-tests-1"  # of the server with limits


@dataclass
class RunningServer:
    """A server that listens."""

    url: str  # without /v1
    process: subprocess.Popen[str]
    log: Path | None = None  # what it writes to stderr

    def stop(self) -> int:
        """End it by SIGTERM; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextlib.contextmanager
def serving(
    *overrides: str, log: Path | None = None, is_forked: bool = True
) -> Iterator[RunningServer]:
    """Run `preset=serve` with these overrides until the block ends.

    Args:
        log: gets what it writes to stderr.
        is_forked: it and its engines are forks, which have a template beside the engines; else it
            is started as users do.
    """
    words = ["preset=serve", "task.port=0", "runtime.threads=1", "runtime.device=cpu", *overrides]
    with contextlib.ExitStack() as stack:
        errors = stack.enter_context(log.open("w")) if log is not None else subprocess.DEVNULL
        process = (popen() if is_forked else subprocess.Popen)(
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
            yield RunningServer(found.group(), process, log)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def engines(server: RunningServer) -> list[psutil.Process]:
    """Its engines, each of which leads a session of its own, as the template of a fork does not."""
    children = psutil.Process(server.process.pid).children()
    return [one for one in children if os.getsid(one.pid) == one.pid]


def line_of(server: RunningServer, request_id: str) -> dict[str, Any]:
    """The line of a request in a server's log, once it is there."""
    assert server.log is not None
    for _ in range(600):
        for line in server.log.read_text().splitlines():
            if line.startswith("{") and (found := json.loads(line)).get("request_id") == request_id:
                return found
        time.sleep(0.1)
    raise AssertionError(f"{request_id} has not ended")


def until_idle(server: RunningServer, key: str = "none") -> None:
    """Wait until no request runs and every block is free again."""
    headers = {"authorization": f"Bearer {key}"}
    gauges = r"^minivllm:(?:num_requests_running|kv_cache_usage_perc)\{.*\} (\S+)$"
    for _ in range(600):
        text = ask(server.url, "/metrics", headers=headers, method="GET").body.decode()
        if [float(value) for value in re.findall(gauges, text, re.MULTILINE)] == [0.0, 0.0]:
            return
        time.sleep(0.05)
    raise AssertionError("requests run, or blocks are lost")
