"""Lines and JSON lists of any size, a piece at a time; what gzip has packed, too."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.errors import BadInput
from minivllm.platform import text_files
from minivllm.platform.text_files import read_begin, read_lines, read_list

TEXT = b'[{"a": 1},\n{"a": 2}]\n'


@pytest.mark.parametrize("name", ["list.json", "list.json.gz"])
def test_packed_files_are_known_by_their_beginning_and_not_by_their_name(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    for content in (TEXT, gzip.compress(TEXT)):
        path.write_bytes(content)
        assert list(read_lines(path, "it")) == TEXT.splitlines()
        assert list(read_list(path, "it")) == json.loads(TEXT)


@pytest.mark.parametrize("damage", ["cut", "flipped", "no gzip"])
def test_what_cannot_be_unpacked_is_an_error(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "list.json.gz"
    packed = gzip.compress(b"0123456789\n" * 1000)
    changed = {
        "cut": packed[:-12],
        "flipped": packed[:20] + bytes([packed[20] ^ 0xFF]) + packed[21:],
        "no gzip": packed[:2] + b"\x00" + packed[3:],
    }
    path.write_bytes(changed[damage])
    with pytest.raises(BadInput, match=r"^it cannot be read: "):
        list(read_lines(path, "it"))
    with pytest.raises(BadInput, match=r"list\.json\.gz:1: (cannot be read|not a JSON list)"):
        list(read_list(path, "it"))


def test_the_begin_of_a_file_is_no_more_than_its_first_bytes(tmp_path: Path) -> None:
    content = bytes(text_files.CHUNK) + b"the rest"
    for data in (content, gzip.compress(content)):
        (tmp_path / "file").write_bytes(data)
        assert read_begin(tmp_path / "file", "the file") == bytes(text_files.CHUNK)
    (tmp_path / "file").write_bytes(gzip.compress(b"text")[:-6])
    with pytest.raises(BadInput, match=r"^the file cannot be read: .*; fetch it again$"):
        read_begin(tmp_path / "file", "the file", "fetch it again")


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
        patch.setattr(text_files, "CHUNK", chunk)  # every boundary falls within some value
        assert list(read_list(path, "x")) == values
        path.write_text(text[:-1])
        with pytest.raises(BadInput, match=r"list\.json:\d+: not valid JSON"):
            list(read_list(path, "x"))


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
        list(read_list(path, "x", longest=50))
    assert "\n" not in str(error.value)


def test_a_list_is_not_read_further_than_it_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text("[" + "1, " * (1 << 20) + "broken")
    values = read_list(path, "x")
    assert [next(values) for _ in range(5)] == [1] * 5


def test_lines_are_read_one_by_one_and_have_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1234\r\n\n12\n12345\n")
    lines = read_lines(path, "x", longest=4)
    assert [next(lines), next(lines), next(lines)] == [b"1234", b"", b"12"]
    with pytest.raises(BadInput, match="x, line 4: longer than 4 bytes"):
        next(lines)
