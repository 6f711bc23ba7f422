"""The program of a child process of the tests: it prints what it is sent, and sends it back."""

from __future__ import annotations

from minivllm.processes.started import run_child
from tests.processes.pretended_ray import echo

if __name__ == "__main__":
    run_child(echo)
