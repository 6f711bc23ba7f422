"""What another process prints reaches this one's log, without secrets, and its end is kept."""

from __future__ import annotations

import pytest

from minivllm.platform.processes.output import TAIL_LINES, CopiedOutput


def test_lines_are_copied_and_the_last_ones_are_kept(capfd: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    output = CopiedOutput("rank 1: ", told.append)
    assert output.last == ""
    output.copy([b"one\n", b"two\x1b[31m\n", b"\n", b"\xff three\n", b"end"])
    assert output.last == "two | \ufffd three | end"
    assert told == ["one", "two", "", "\ufffd three", "end"]
    assert capfd.readouterr().err.splitlines()[0] == "rank 1: one"
    output.copy([b"\n"] * TAIL_LINES)
    assert output.last == ""


def test_a_secret_is_not_copied(capfd: pytest.CaptureFixture[str]) -> None:
    from minivllm import redaction

    redaction.learn({"engine": {"api_key": "sk-a-secret-of-tests"}})
    output = CopiedOutput()
    output.copy([b"key sk-a-secret-of-tests\n"])
    assert "a-secret" not in capfd.readouterr().err + output.last
