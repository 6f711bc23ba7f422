"""The program of a child process of the tests: it prints what it is sent, and sends it back. The
command in the variable STARTS is started first."""

from __future__ import annotations

import os
import subprocess

from minivllm.processes.started import run_child
from tests.processes.pretended_ray import echo

STARTS = "MINIVLLM_TESTS_STARTS"

if __name__ == "__main__":
    if STARTS in os.environ:
        subprocess.Popen(os.environ[STARTS].split())
    run_child(echo)
