"""What a file of pickled weights may hold, and what it may take."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from minivllm.errors import BadInput
from minivllm.models.load.unpickle import Task, convert


def convert_file(path: Path, tied: bool = False) -> dict[str, torch.Tensor]:
    target = path.with_suffix(".safetensors")
    convert(Task(str(path), str(target), tied, memory=1 << 30, cpu_s=60))
    return load_file(target)


def saved(path: Path, state: Any, **options: Any) -> Path:
    torch.save(state, path, **options)
    return path


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("around", [None, "state_dict", "model"])
def test_tensors_come_out_as_they_went_in(around: str | None, zipped: bool, tmp_path: Path) -> None:
    state: Any = {
        "a.weight": torch.randn(3, 5).bfloat16(),
        "b.weight": torch.randn(4, 2).t(),
        "c": torch.nn.Parameter(torch.arange(3.0)),
        "d": torch.tensor(7),
    }
    whole = state if around is None else {around: state, "epoch": 3, "optimizer": {"lr": 0.1}}
    found = convert_file(saved(tmp_path / "model.pt", whole, _use_new_zipfile_serialization=zipped))
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor.detach())


@pytest.mark.parametrize("tied", [True, False])
def test_shared_tensors_are_copied_and_a_tied_head_is_left_out(tied: bool, tmp_path: Path) -> None:
    table, whole = torch.randn(6, 4), torch.randn(10)
    state = {
        "lm_head.weight": table,
        "model.embed_tokens.weight": table,
        "first": whole[:5],
        "second": whole[5:],
        "again": whole[:5],
    }
    found = convert_file(saved(tmp_path / "model.bin", state), tied)
    assert ("lm_head.weight" in found) is not tied
    for name in found:
        assert torch.equal(found[name], state[name])


class Malicious:
    """What runs a command where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_that_would_run_code_is_refused_and_does_not(zipped: bool, tmp_path: Path) -> None:
    state = {"a": torch.ones(2), "b": Malicious(tmp_path / "marker")}
    file = saved(tmp_path / "model.bin", state, _use_new_zipfile_serialization=zipped)
    with pytest.raises(
        BadInput, match=r"model\.bin is rejected: it asks for (posix|nt)\.system"
    ) as caught:
        convert_file(file)
    assert not (tmp_path / "marker").exists() and "\n" not in str(caught.value)


def test_an_archive_that_unpacks_to_more_is_refused(tmp_path: Path) -> None:
    file = saved(tmp_path / "model.bin", {"a": torch.zeros(1000)})
    bomb = tmp_path / "bomb.bin"
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.namelist():
            new.writestr(entry, old.read(entry))
    with pytest.raises(BadInput, match="it is compressed"):
        convert_file(bomb)


@pytest.mark.parametrize(
    "state",
    [
        {"a": torch.zeros(1).expand(1 << 40)},
        {str(i): tensor for i in range(2000) for tensor in [torch.zeros(1)]},
    ],
    ids=["expanded", "small"],
)
def test_a_few_bytes_do_not_become_terabytes(state: Any, tmp_path: Path) -> None:
    file = saved(tmp_path / "model.bin", state)
    if len(state) == 1:
        with pytest.raises(BadInput, match=r"its tensors take 4\.?\d* ?.*iB"):
            convert_file(file)
    else:
        assert len(convert_file(file)) == 2000


def test_one_storage_for_many_tensors_is_no_bomb(tmp_path: Path) -> None:
    whole = torch.zeros(100_000)
    file = saved(tmp_path / "model.bin", {str(i): whole for i in range(50)})
    with pytest.raises(BadInput, match="its tensors take"):
        convert_file(file)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([torch.ones(1)], "holds no tensors by name, but a list"),
        ({}, "holds no tensors by name"),
        ({"a": 3}, "'a' is a int, not a tensor"),
        ({"a": torch.ones(1), 7: torch.ones(1)}, "7 is a Tensor, not a tensor|7 is"),
        ({"a": torch.ones(2).to_sparse()}, "of a kind that .safetensors does not have"),
        ({"a": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}, "of a kind"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_is_no_set_of_tensors_is_refused(state: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=message):
        convert_file(saved(tmp_path / "model.bin", state))


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(at=st.integers(0, 2000), value=st.integers(0, 255), legacy=st.booleans())
@pytest.mark.filterwarnings("ignore")
def test_a_damaged_file_ends_in_an_exception_and_no_more(
    tmp_path: Path, at: int, value: int, legacy: bool
) -> None:
    """The process turns any exception into one line; what must not come is a crash."""
    file = saved(
        tmp_path / "m.bin", {"a": torch.ones(4)}, _use_new_zipfile_serialization=not legacy
    )
    content = bytearray(file.read_bytes())
    content[at % len(content)] = value
    file.write_bytes(bytes(content))
    try:
        convert_file(file)
    except (Exception, pickle.UnpicklingError) as error:
        assert not isinstance(error, SystemExit)
