"""Errors cross the border of a process with the status that a record has for them."""

from __future__ import annotations

import pytest

from minivllm.errors import BadInput, Crashed, classify
from minivllm.processes.messages import Failed, failed


def test_errors_have_the_status_of_a_record() -> None:
    assert failed(BadInput("no such model")) == Failed("no such model", "invalid")
    assert failed(MemoryError("full\nup")) == Failed("full", "oom")
    assert failed(ValueError("wrong")) == Failed("wrong", "error")
    assert failed(Crashed("rank 1 ended with 9")) == Failed("rank 1 ended with 9", "crashed")
    assert failed(RuntimeError("CUDA error: out of memory")).status == "oom"


@pytest.mark.parametrize("status", ["invalid", "oom", "crashed", "error"])
def test_the_error_that_is_raised_here_has_the_status_of_the_one_there(status: str) -> None:
    error = Failed("why", status).error
    assert (classify(error), str(error)) == (status, "why")
