"""Answers repeat what clients send, also where JSON's own libraries do not write it."""

from __future__ import annotations

import json

import pytest

from minivllm.serving.http.json_answer import JsonAnswer


@pytest.mark.parametrize("value", ['"\\ud800"', "NaN", '"é値"', "1e999"])
def test_what_python_reads_is_written(value: str) -> None:
    content = json.loads(value)
    body = bytes(JsonAnswer({"value": content}).body)
    assert repr(json.loads(body)["value"]) == repr(content) and body.isascii()
