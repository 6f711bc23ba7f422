"""Files that gzip has packed are read as what is in them; damaged ones are one clear line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from minivllm.errors import BadInput
from minivllm.platform.untrusted import read_lines, read_list

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
