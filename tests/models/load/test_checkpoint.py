"""What lies where a checkpoint's files should be: pipes, devices, folders, files that are too
large, odd headers."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minivllm.errors import BadInput
from minivllm.models.load.checkpoint import INDEX, SINGLE, Checkpoint
from minivllm.models.load.source import resolve
from tests.models.load.test_source import node
from tests.reference import make_checkpoint

FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    INDEX,
    SINGLE,
    "model-00001-of-00001.safetensors",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(autouse=True)
def watchdog() -> Iterator[None]:
    """What waits for a pipe is ended, and fails."""

    def ring(*_: Any) -> None:
        raise TimeoutError("waited for a pipe")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_a_file_that_is_none_is_refused_at_once(kind: str, name: str, folder: Path) -> None:
    file = folder / name
    if name == FILES[-1]:
        (folder / SINGLE).unlink()
        (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        file.mkdir()
    with pytest.raises(
        BadInput, match=rf"{name} is a (pipe or a device|folder), not a regular file"
    ) as caught:
        resolve(node(folder), False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "mib"), [("config.json", 5), ("generation_config.json", 5), (INDEX, 40), (SINGLE, 0)]
)
def test_what_is_too_large_is_not_read_whole(name: str, mib: int, folder: Path) -> None:
    if name == SINGLE:  # a header of 3 GB in a file that has them, but not on the disk
        with (folder / name).open("wb") as file:
            file.write((3 << 30).to_bytes(8, "little"))
            file.truncate(4 << 30)
    else:
        with (folder / name).open("wb") as file:
            file.truncate(mib << 20)
    with pytest.raises(BadInput, match=rf"{name} is (larger than|not a readable)"):
        resolve(node(folder), False)


NAMES = st.sampled_from(
    [
        *(
            "model.embed_tokens.weight",
            "embed_tokens.weight",
            "language_model.model.embed_tokens.weight",
        ),
        *(
            "lm_head.weight",
            "model.lm_head.weight",
            "module.lm_head.weight",
            "model.norm.weight",
            "norm.weight",
        ),
        *(
            "model.layers.0.mlp.experts.gate_up_proj",
            "layers.0.mlp.experts.down_proj",
            "_orig_mod.",
        ),
        *(
            "model.layers.0.block_sparse_moe.experts.0.w1.weight",
            "model.layers.0.mlp.experts.0.gate_proj.weight",
        ),
        *(
            "",
            ".",
            "language_model.",
            "model.language_model.x",
            "model.layers.0.mlp.experts.gate_up_proj.weight",
        ),
    ]
)


@pytest.mark.parametrize("shape", [[10**12, 2, 1], [3, 2, 1], [0, 2, 1]])
def test_a_tensor_has_no_more_parts_than_its_bytes(shape: list[int], tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    text = json.dumps({name: {"dtype": "F4", "shape": shape, "data_offsets": [0, 8]}}).encode()
    (tmp_path / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 8)
    assert [*Checkpoint.open(tmp_path).tensors] == [name]


SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 4, 8, 1 << 40]), max_size=4)


@pytest.mark.fuzz("weights")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(entries=st.dictionaries(NAMES, st.tuples(SHAPES, st.integers(0, 64)), max_size=5))
def test_any_names_and_shapes_are_a_checkpoint_or_bad_input(
    tmp_path: Path, entries: dict[str, tuple[list[int], int]]
) -> None:
    header, end = {}, 0
    for name, (shape, size) in entries.items():
        header[name] = {"dtype": "X4", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    (tmp_path / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * end)
    try:
        tensors = Checkpoint.open(tmp_path).tensors
    except BadInput as error:
        assert "\n" not in str(error)
    else:
        assert all(
            8 <= tensor.begin <= tensor.end <= 8 + len(text) + end for tensor in tensors.values()
        )


@pytest.mark.fuzz("weights")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    index=st.recursive(
        st.none()
        | st.integers()
        | st.text(max_size=4)
        | st.sampled_from([SINGLE, "..", "/", "a\0b", "x" * 300]),
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.dictionaries(
                st.sampled_from(["weight_map", "model.norm.weight", "a"]), inner, max_size=3
            )
        ),
        max_leaves=5,
    )
)
def test_any_index_is_read_or_bad_input(tmp_path: Path, index: Any) -> None:
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(BadInput):  # the folder has no weights
        Checkpoint.open(tmp_path)
