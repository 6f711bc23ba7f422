"""Errors cross the border of a process with the status that a record has for them."""

from __future__ import annotations

from minivllm.errors import BadInput
from minivllm.processes.messages import Failed, failed


def test_errors_have_the_status_of_a_record() -> None:
    assert failed(BadInput("no such model")) == Failed("no such model", "invalid")
    assert failed(MemoryError("full\nup")) == Failed("full", "oom")
    assert failed(ValueError("wrong")) == Failed("wrong", "error")
