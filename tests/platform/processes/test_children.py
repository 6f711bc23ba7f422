"""A process that is started here finds the modules that this one finds; its output reaches this
one's log, without secrets, and its end is kept."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from minivllm import redaction
from minivllm.platform.processes.children import TAIL_LINES, CopiedOutput, module_path


def test_each_place_is_named_once_and_the_present_folder_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "/a", str(tmp_path), "/a"])
    assert module_path().split(os.pathsep) == [str(tmp_path), "/a"]


def test_lines_are_copied_and_the_last_ones_are_kept(capfd: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    output = CopiedOutput("rank 1: ", lines.append)
    assert output.last == ""
    output.copy([b"one\n", b"two\x1b[31m\n", b"\n", b"\xff three\n", b"end"])
    assert output.last == "two | \ufffd three | end"
    assert lines == ["one", "two", "", "\ufffd three", "end"]
    assert capfd.readouterr().err.splitlines()[0] == "rank 1: one"
    output.copy([b"\n"] * TAIL_LINES)
    assert output.last == ""


def test_a_secret_is_not_copied(capfd: pytest.CaptureFixture[str]) -> None:
    redaction.learn({"engine": {"api_key": "sk-a-secret-of-tests"}})
    output = CopiedOutput()
    output.copy([b"key sk-a-secret-of-tests\n"])
    assert "a-secret" not in capfd.readouterr().err + output.last
