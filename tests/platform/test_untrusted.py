"""Reading what comes from outside: limits, kinds of files, and one line for each that cannot be
taken."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.errors import BadInput
from minivllm.platform import untrusted
from tests.damage import damaged


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
        *(untrusted.open_file, untrusted.read_begin, untrusted.read_json),
        lambda *a: untrusted.read_bytes(a[0], 10, *a[1:]),
    ],
)
def test_only_regular_files_are_read(
    tmp_path: Path, make: Callable[[Path], Path], message: str, read: Callable[..., Any]
) -> None:
    with pytest.raises(BadInput, match=f"^the file.*{message}.*; fetch it again$"):
        read(make(tmp_path), "the file", "fetch it again")


def test_the_begin_of_a_file_is_no_more_than_its_first_bytes(tmp_path: Path) -> None:
    content = bytes(untrusted.CHUNK) + b"the rest"
    for data in (content, gzip.compress(content)):
        (tmp_path / "file").write_bytes(data)
        assert untrusted.read_begin(tmp_path / "file", "the file") == bytes(untrusted.CHUNK)
    (tmp_path / "file").write_bytes(gzip.compress(b"text")[:-6])
    with pytest.raises(BadInput, match=r"^the file cannot be read: .*; fetch it again$"):
        untrusted.read_begin(tmp_path / "file", "the file", "fetch it again")


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


@given(
    st.lists(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=9),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.text(max_size=3), inner, max_size=3)
            ),
            max_leaves=8,
        ),
        max_size=6,
    ),
    st.integers(1, 20),
    st.sampled_from([None, 1]),
)
def test_a_list_is_read_value_by_value(
    tmp_path_factory: pytest.TempPathFactory, values: list[Any], chunk: int, indent: int | None
) -> None:
    path = tmp_path_factory.mktemp("list") / "list.json"
    text = json.dumps(values, indent=indent)
    path.write_text("\ufeff" + text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(untrusted, "CHUNK", chunk)  # every boundary falls within some value
        assert list(untrusted.read_list(path, "x")) == values
        path.write_text(text[:-1])
        with pytest.raises(BadInput, match=r"list\.json:\d+: not valid JSON"):
            list(untrusted.read_list(path, "x"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ":1: not a JSON list"),
        (b'{"a": 1}', ":1: not a JSON list"),
        (b"[1]\n[2]", ":2: not valid JSON .Extra data"),
        (b"[1\n2]", ":2: not valid JSON .Expecting ',' delimiter"),
        (b"[1,\n]", ":2: not valid JSON .Expecting value"),
        (b"[\n" + b"[" * 100_000, ":2: not valid JSON .nested too deeply"),
        (b'["' + b"a" * 99 + b'"]', ":1: a value longer than 50 characters"),
        (b'["' + b"a" * (1 << 20), ":1: not valid JSON, or a value longer than 50 characters"),
        (b'[1, "\xff"]', ":1: not UTF-8"),
        (b"[" + b"9" * 5000 + b"]", ":1: not valid JSON"),
    ],
)
def test_what_is_no_list_is_told_with_its_line(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "list.json"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=message) as error:
        list(untrusted.read_list(path, "x", longest=50))
    assert "\n" not in str(error.value)


def test_a_list_is_not_read_further_than_it_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text("[" + "1, " * (1 << 20) + "broken")
    values = untrusted.read_list(path, "x")
    assert [next(values) for _ in range(5)] == [1] * 5


def test_lines_are_read_one_by_one_and_have_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1234\r\n\n12\n12345\n")
    lines = untrusted.read_lines(path, "x", longest=4)
    assert [next(lines), next(lines), next(lines)] == [b"1234", b"", b"12"]
    with pytest.raises(BadInput, match="x, line 4: longer than 4 bytes"):
        next(lines)


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


# ---- archives


def tarred(*members: tarfile.TarInfo | tuple[str, bytes]) -> bytes:
    """A tar archive of members without content, and of files."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for member in members:
            if isinstance(member, tuple):
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                tar.addfile(info, io.BytesIO(member[1]))
            else:
                tar.addfile(member)
    return raw.getvalue()


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def test_the_files_of_an_archive(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.xz"
    path.write_bytes(
        lzma.compress(tarred(special("cell", tarfile.DIRTYPE), ("cell/a", b"1"), ("./cell/b", b"")))
    )
    assert untrusted.read_archive(path, "a") == {"cell/a": b"1", "cell/b": b""}


A = ("cell/a", b"12345")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is cut off"),
        (b"no xz at all", "is no archive that xz has packed, or damaged"),
        (lzma.compress(tarred(A))[:-30], "is cut off"),
        (lzma.compress(tarred(A)) + b"more", "goes on after its end"),
        (lzma.compress(b"no tar" * 200), "is no tar archive, or damaged"),
        (lzma.compress(tarred(A)[:514]), "is no tar archive, or damaged"),
        (lzma.compress(tarred(A, A)), "cell/a is in the archive twice"),
        (lzma.compress(tarred(A, ("./cell//a", b""))), "is in the archive twice"),
        (lzma.compress(tarred(("/etc/passwd", b""))), "/etc/passwd lies outside the archive"),
        (lzma.compress(tarred(("cell/../../x", b""))), "lies outside the archive"),
        (lzma.compress(tarred(special("..", tarfile.DIRTYPE))), "lies outside the archive"),
        (lzma.compress(tarred(special("l", tarfile.SYMTYPE, "/etc"))), "l is a link or a device"),
        (
            lzma.compress(tarred(A, special("l", tarfile.LNKTYPE, "cell/a"))),
            "l is a link or a device",
        ),
        (lzma.compress(tarred(special("p", tarfile.FIFOTYPE))), "p is a link or a device"),
        (lzma.compress(tarred(special("s", tarfile.GNUTYPE_SPARSE))), "s is a link or a device"),
    ],
)
def test_an_archive_that_cannot_be_taken_is_one_line(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "a.tar.xz"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=message) as error:
        untrusted.read_archive(path, "a.tar.xz")
    assert "\n" not in str(error.value) and str(error.value).startswith("a.tar.xz")


def test_an_archive_is_bounded_in_size_files_and_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.tar.xz"
    path.write_bytes(lzma.compress(tarred(("zeros", bytes(3 << 20)))))  # some hundred bytes
    monkeypatch.setattr(untrusted, "MAX_ARCHIVE", 2 << 20)
    with pytest.raises(BadInput, match="holds more than 2 MiB"):
        untrusted.read_archive(path, "a")
    monkeypatch.setattr(untrusted, "UNPACKING_MEMORY", 1 << 20)
    with pytest.raises(BadInput, match="Memory usage limit"):
        untrusted.read_archive(path, "a")
    monkeypatch.undo()
    path.write_bytes(lzma.compress(tarred(*((str(number), b"") for number in range(4)))))
    monkeypatch.setattr(untrusted, "MAX_ARCHIVE_FILES", 3)
    with pytest.raises(BadInput, match="holds more than 3 files"):
        untrusted.read_archive(path, "a")


@pytest.mark.fuzz("records")
@given(damaged(tarred(A, ("cell/long" * 40, b"x" * 600), special("cell", tarfile.DIRTYPE))))
def test_a_damaged_archive_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, tar: bytes
) -> None:
    path = tmp_path_factory.mktemp("archive") / "a.tar.xz"
    path.write_bytes(lzma.compress(tar, preset=0))
    try:
        found = untrusted.read_archive(path, "a")
    except BadInput as error:
        assert "\n" not in str(error)
    else:
        assert all(isinstance(content, bytes) for content in found.values())
