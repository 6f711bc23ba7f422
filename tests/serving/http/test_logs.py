"""Lines of JSON that a reader who has stopped reading does not hold up."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading

import pytest

from minivllm.serving.http import logs
from minivllm.serving.http.logs import LineWriter, json_lines


def test_a_record_is_a_line_of_json_with_its_fields(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", text := io.StringIO())
    with json_lines():
        logger = logging.getLogger("minivllm.serving")
        logger.info("request", extra={"fields": {"status": 200}})
        try:
            raise ValueError("a\nb")
        except ValueError as error:
            logger.error("failed", exc_info=error)
    first, second = map(json.loads, text.getvalue().splitlines())
    assert (first["level"], first["message"], first["status"]) == ("info", "request", 200)
    assert "ValueError: a\nb" in second["exception"] and second["level"] == "error"


class _Stuck(io.StringIO):
    """A stream that takes nothing until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def write(self, text: str) -> int:
        self.goes_on.wait()
        return super().write(text)


def test_lines_that_nobody_reads_are_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logs, "MOST_WAITING", 5)
    monkeypatch.setattr(sys, "stderr", stuck := _Stuck())
    writer = LineWriter()
    for number in range(50):
        writer.emit(logging.makeLogRecord({"msg": f"line {number}"}))
    stuck.goes_on.set()
    while not writer._lines.empty():
        pass
    writer.emit(logging.makeLogRecord({"msg": "the last"}))
    writer.close()
    lines = [json.loads(line) for line in stuck.getvalue().splitlines()]
    dropped = sum(line.get("dropped_lines", 0) for line in lines)
    assert dropped + sum("message" in line for line in lines) == 51 and dropped >= 44
