"""Reading what comes from outside: limits, kinds of files, and one line for each that cannot be
taken."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.errors import BadInput
from minivllm.platform import untrusted
from minivllm.platform.text_files import read_begin


def link(folder: Path) -> Path:
    (folder / "link").symlink_to("gone")
    return folder / "link"


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "gone", "there is no such file"),
        (lambda folder: folder, "is a folder"),
        (link, "there is no such file at the other end of this link"),
        (pipe, "is a pipe or a device"),
        (lambda folder: Path("/dev/zero"), "is a pipe or a device"),
        (lambda folder: Path("a\0b"), "cannot be read"),
    ],
)
@pytest.mark.parametrize(
    "read",
    [
        *(untrusted.open_file, read_begin, untrusted.read_json),
        lambda *a: untrusted.read_bytes(a[0], 10, *a[1:]),
    ],
)
def test_only_regular_files_are_read(
    tmp_path: Path, make: Callable[[Path], Path], message: str, read: Callable[..., Any]
) -> None:
    with pytest.raises(BadInput, match=f"^the file.*{message}.*; fetch it again$"):
        read(make(tmp_path), "the file", "fetch it again")


def test_a_place_is_told_where_nothing_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "dangling").symlink_to("gone")
    (tmp_path / "file").touch()
    assert untrusted.place("~/file", "x") == tmp_path / "file"
    for name in ("gone", "dangling", "file/below"):
        assert untrusted.place(tmp_path / name, "x") == tmp_path / name
    assert untrusted.place("~no such user/a", "x") == Path("~no such user/a")
    (tmp_path / "loop").symlink_to("loop")
    for name, reason in (
        ("a" * 300, "name too long"),
        ("a\0b", "null"),
        (str(tmp_path / "loop"), "links"),
    ):
        with pytest.raises(
            BadInput, match=f"^the folder cannot be read: .*{reason}.*; give another$"
        ):
            untrusted.place(name, "the folder", "give another")


def test_a_file_may_be_as_large_as_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert untrusted.read_bytes(path, 5, "x") == b"12345"
    with pytest.raises(BadInput, match="x is larger than 4 bytes"):
        untrusted.read_bytes(path, 4, "x")


def test_text_that_is_none_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one\ntwo \xff")
    with pytest.raises(BadInput, match=r":2: not UTF-8.*; say so"):
        untrusted.read_text(path, 100, "x", "say so")
    path.write_bytes(untrusted.BYTE_ORDER_MARK + b"one")
    assert untrusted.read_text(path, 100, "x") == "one"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[" * 200_000, "nested too deeply"),
        ("{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        ("9" * 5000, "not valid JSON"),
    ],
)
def test_json_that_is_none(content: str | bytes, message: str) -> None:
    with pytest.raises(BadInput, match=f"^here is {message}"):
        untrusted.parse_json(content, "here")


def test_an_object_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text("[1]")
    with pytest.raises(BadInput, match="x is not a JSON object"):
        untrusted.read_object(path, "x")
    path.write_text('{"a": 1}')
    assert untrusted.read_object(path, "x") == {"a": 1}


@given(st.binary(max_size=40))
def test_any_bytes_are_json_or_bad_input(content: bytes) -> None:
    try:
        value = untrusted.parse_json(content, "here")
    except BadInput as error:
        assert str(error).startswith("here ")
    else:
        assert json.dumps(value) == json.dumps(json.loads(content))


def test_a_terminal_gets_no_escape_sequences() -> None:
    raw = "a\x1b[31mb\x1b]0;title\x07c\x1b]8;;http://x\x1b\\d\x1bPq\x1b\\e\x9b1mf\rg\u202eh\tä\n"
    assert untrusted.printable(raw) == "abcde1mfgh\tä\n"


@given(st.text())
def test_what_is_printable_stays_so(text: str) -> None:
    once = untrusted.printable(text)
    assert untrusted.printable(once) == once
    assert not {"\x1b", "\r", "\x9b", "\x07"} & set(once)
