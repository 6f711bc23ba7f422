"""Headers of GGUF files: what is read, and that any damage is one line."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minivllm.errors import BadInput
from minivllm.kernels.device import BuildContext
from minivllm.models.load.gguf.file import GGUFFile, StoredArray, is_gguf
from minivllm.models.load.loading import load_model
from minivllm.models.load.source import resolve
from minivllm.models.options import ModelOptions
from minivllm.quant.plain import Plain
from tests.damage import damaged
from tests.gguf_files import LLAMA, tensors, write

TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [chr(33 + i) for i in range(94)] + ["ab", "abc"],
    "tokenizer.ggml.token_type": [1] * 96,
    "tokenizer.ggml.merges": ["a b", "ab c"],
    "tokenizer.ggml.eos_token_id": 3,
}
FILE = LLAMA | TOKENIZER | {"a.flag": True, "a.number": 1e-6}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "small.gguf", FILE, tensors())


def header(*values: Any, keys: int = 1, count: int = 0) -> bytes:
    """A header with further bytes: texts as such, and numbers by their `struct` format."""
    parts = [b"GGUF", struct.pack("<IQQ", 3, count, keys)]
    for value in values:
        if isinstance(value, str):
            parts.append(struct.pack("<Q", len(value)) + value.encode())
        else:
            parts.append(struct.pack("<" + value[0], *value[1:]))
    return b"".join(parts)


def test_everything_is_read_as_the_package_reads_it(path: Path) -> None:
    file, theirs = GGUFFile.open(path), gguf.GGUFReader(path)
    known = {key: field for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert file.metadata.keys() == known.keys()
    for key, field in known.items():
        value = file.metadata[key]
        if isinstance(value, StoredArray):
            assert (file.texts if value.kind == 8 else file.numbers)(key) == field.contents()
        else:
            assert value == pytest.approx(field.contents())
    assert file.metadata["a.number"] == 1e-6  # and not the nearest float32
    assert {
        name: (tensor.dtype, tensor.shape, tensor.begin, tensor.end - tensor.begin)
        for name, tensor in file.tensors.items()
    } == {
        tensor.name: (
            tensor.tensor_type.name,
            tuple(tensor.shape.tolist()[::-1]),
            tensor.data_offset,
            tensor.n_bytes,
        )
        for tensor in theirs.tensors
    }


def test_long_arrays_of_texts_are_passed_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text may lie across what is read ahead, be longer than it, or be empty."""
    texts = ["x" * (length % 40) for length in range(100)] + ["y" * 500, "", "z"]
    path = write(tmp_path / "file.gguf", FILE | {"a.list": texts, "b.number": 3}, tensors())
    for ahead in (8, 9, 31, 1 << 20):
        monkeypatch.setattr("minivllm.models.load.gguf.file._AHEAD", ahead)
        file = GGUFFile.open(path)
        assert file.texts("a.list") == texts and file.metadata["b.number"] == 3


WRONG = {
    "another format": (b"PK\3\4" + bytes(60), "does not begin with GGUF"),
    "empty": (b"", "ends within its header"),
    "version 1": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "of version 1 of GGUF"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "written in big-endian order"),
    "too many keys": (header(keys=1 << 40), "1,099,511,627,776 keys cannot be"),
    "too many tensors": (header(keys=0, count=1 << 40), "1,099,511,627,776 tensors"),
    "a key that is cut off": (header(("Q", 100)), "ends within its header"),
    "a long key": (header(("Q", 1 << 50)), "a text of 1,125,899,906,842,624 bytes cannot be"),
    "a key of no text": (header(("Q", 1), ("B", 255), ("I", 7)), "a text is not UTF-8"),
    "a key twice": (header("k", ("IB", 7, 1), "k", ("IB", 7, 1), keys=2), "key k is there twice"),
    "an unknown type": (header("k", ("I", 77)), "metadata of type 77 is unknown"),
    "an array of arrays": (header("k", ("IIQ", 9, 9, 1)), "an array of type 9 is unknown"),
    "an array beyond the file": (header("k", ("IIQ", 9, 4, 1 << 61)), "ends within its header"),
    "texts beyond the file": (header("k", ("IIQ", 9, 8, 1 << 61)), "ends within its header"),
    "a text of an array beyond the file": (
        header("k", ("IIQ", 9, 8, 2), "ab", ("Q", 99)),
        "ends within its header",
    ),
    "a part of a model": (
        header("split.count", ("IH", 2, 3)),
        "is the first of 3 parts, which are found by their names: call it NAME-00001-of-00003.gguf",
    ),
    "an odd alignment": (header("general.alignment", ("II", 4, 48)), "must be a power of two"),
    "no alignment": (header("general.alignment", ("II", 4, 0)), "must be a whole number from 1"),
    "no dimension": (header("t", ("I", 0), keys=0, count=1), "tensor t has 0 dimensions"),
    "five dimensions": (header("t", ("I", 5), keys=0, count=1), "tensor t has 5 dimensions"),
    "an unknown format": (
        header("t", ("IQIQ", 1, 32, 99, 0), keys=0, count=1),
        "tensor t is of format 99, which is unknown",
    ),
    "a row that is no block": (
        header("t", ("IQIQ", 1, 33, 8, 0), keys=0, count=1),
        r"tensor t of Q8_0 has the shape \[33\]",
    ),
    "an absurd size": (
        header("t", ("IQQQQIQ", 4, *[1 << 31] * 4, 0, 0), keys=0, count=1),
        r"where tensor t ends at \d{30,}",
    ),
    "no values": (header("t", ("IQIQ", 1, 0, 0, 0), keys=0, count=1), r"has the shape \[0\]"),
    "an offset beyond the file": (
        header("t", ("IQIQ", 1, 1, 0, 1 << 60), keys=0, count=1),
        "where tensor t ends at 11529",
    ),
    "an offset that is not aligned": (
        header("t", ("IQIQ", 1, 1, 0, 4), ("64x",), keys=0, count=1),
        "tensor t begins at byte 68, where it cannot",
    ),
    "tensors in one place": (
        header("t", ("IQIQ", 1, 16, 0, 0), "u", ("IQIQ", 1, 16, 0, 32), ("256x",), keys=0, count=2),
        "tensor u begins at byte 1",
    ),
    "a tensor twice": (
        header("t", ("IQIQ", 1, 1, 0, 0), "t", ("IQIQ", 1, 1, 0, 32), ("99x",), keys=0, count=2),
        "tensor t is there twice",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line_that_names_it(case: str, tmp_path: Path) -> None:
    content, message = WRONG[case]
    (tmp_path / "file.gguf").write_bytes(content)
    with pytest.raises(BadInput, match=message) as raised:
        GGUFFile.open(tmp_path / "file.gguf")
    assert "\n" not in str(raised.value) and "file.gguf" in str(raised.value)


def test_a_file_that_is_cut_off_names_its_tensor(path: Path, tmp_path: Path) -> None:
    content = path.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(content[:-2000])
    with pytest.raises(BadInput, match=r"has \d+ bytes where tensor blk.0.ffn_down.weight ends"):
        resolve({"path": str(tmp_path / "cut.gguf")}, False)


def test_arrays_are_of_one_kind(path: Path) -> None:
    file = GGUFFile.open(path)
    assert file.texts("absent") is None and file.numbers("absent") is None
    with pytest.raises(BadInput, match=r"tokens=\(an array of 96\) must be numbers"):
        file.numbers("tokenizer.ggml.tokens")
    with pytest.raises(BadInput, match=r"a.flag=True must be an array"):
        file.texts("a.flag")


def test_a_file_is_known_by_its_name_or_its_first_bytes(path: Path, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(path.read_bytes()[:64])
    (tmp_path / "text.txt").write_text("GGML")
    assert is_gguf(path) and is_gguf(tmp_path / "other")
    assert not is_gguf(tmp_path / "text.txt") and not is_gguf(tmp_path)


def test_the_fingerprint_is_of_metadata_and_weights(path: Path, tmp_path: Path) -> None:
    before = GGUFFile.open(path).fingerprint()
    assert before == GGUFFile.open(path).fingerprint()
    for name, values, stored in (
        ("template", FILE | {"tokenizer.chat_template": "x"}, tensors()),
        ("weights", FILE, tensors() | {"output_norm.weight": (np.zeros(256, "f4"), "F32")}),
    ):
        other = write(tmp_path / f"{name}.gguf", values, stored)
        assert GGUFFile.open(other).fingerprint() != before


@pytest.mark.fuzz("gguf")
@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)
@given(st.data())
def test_any_damage_is_a_model_or_one_line(path: Path, tmp_path: Path, data: st.DataObject) -> None:
    content = path.read_bytes()
    start = GGUFFile.open(path).data
    head = data.draw(damaged(content[:start]))
    file = tmp_path / "damaged.gguf"
    file.write_bytes(head + content[start:])
    try:
        loaded = load_model(
            ModelOptions(str(file)), quant=Plain(), context=BuildContext(torch.device("cpu"))
        )
    except BadInput as error:
        assert "\n" not in str(error) and str(error).strip()
    else:
        assert loaded.config.vocab_size == 96
