"""Files of packed weights: what is written is read, and damage anywhere is found."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from minivllm.errors import BadInput
from minivllm.kernels.cpu.library import Kernels
from minivllm.models.load.packed_cache import file as file_module
from minivllm.models.load.packed_cache.file import DIGEST, PackedFile, can_write, write_packed
from tests.memory import in_large_pages

TENSORS = {
    "layer.weight": torch.arange(64 * 33, dtype=torch.int16).view(torch.uint8).view(66, 64),
    "layer.scales": torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "norm.weight": torch.ones(7, dtype=torch.float32),
    "embedding.weight": torch.randn(50, 8, generator=torch.Generator().manual_seed(1)).half(),
}
LAST = ["embedding.weight"]


def nothing(tensor: Tensor) -> None:
    """Asks for no pages."""


def write(path: Path) -> Path:
    write_packed(path, {"what": "a test"}, TENSORS, LAST)
    return path


@pytest.fixture(params=[True, False], ids=["mapped", "read"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_module, "in_large_pages", lambda mapped: request.param)


@pytest.mark.usefixtures("way")
def test_tensors_come_back_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_module, "_CHUNK", 100)  # several pieces a tensor
    monkeypatch.setattr(file_module, "_HUGE", 64)
    packed = PackedFile.open(write(tmp_path / "packed"))
    assert packed.content == {"what": "a test"}
    found = packed.load(LAST, nothing)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype is tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor)
    found["layer.weight"].zero_()  # of this process alone
    assert torch.equal(
        PackedFile.open(packed.path).load(LAST, nothing)["layer.weight"], TENSORS["layer.weight"]
    )


@pytest.mark.skipif(sys.platform != "linux", reason="pages of 2 MB are asked for on Linux")
def test_what_is_read_lies_in_pages_of_2_mb_from_end_to_end(
    kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_module, "in_large_pages", lambda mapped: False)
    plain = torch.empty(8 << 20, dtype=torch.uint8)
    kernels.use_huge_pages_(plain)
    if not in_large_pages([plain.fill_(1)]):
        pytest.skip("the system gives no pages of 2 MB")
    tensors = {f"{n}": torch.full((3 << 20,), n, dtype=torch.uint8) for n in range(8)}
    write_packed(tmp_path / "packed", {}, tensors, ())
    found = PackedFile.open(tmp_path / "packed").load((), kernels.use_huge_pages_)
    assert in_large_pages([*found.values()]) >= (8 * 3 - 2 * 2) << 20  # all but both ends


def test_other_programs_read_the_file(tmp_path: Path) -> None:
    found = load_file(write(tmp_path / "packed.safetensors"))
    assert found.keys() == {*TENSORS, DIGEST}
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


@settings(max_examples=50)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_changed_bit_anywhere_is_found(
    place: float, bit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write(tmp_path_factory.mktemp("packed") / "packed")
    content = bytearray(path.read_bytes())
    at = int(place * len(content))
    content[at] ^= 1 << bit
    path.write_bytes(content)
    with pytest.raises(BadInput, match="packed"):
        PackedFile.open(path).load(LAST, nothing)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", [*TENSORS, DIGEST])
def test_a_changed_tensor_is_found(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "packed")
    content = bytearray(path.read_bytes())
    content[file_module.read_header(path).tensors[name].begin] ^= 1
    path.write_bytes(content)
    with pytest.raises(BadInput, match="is not the one that was written"):
        PackedFile.open(path).load(LAST, nothing)


@given(share=st.floats(0, 1, exclude_max=True))
def test_a_shorter_file_is_found(share: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = write(tmp_path_factory.mktemp("packed") / "packed")
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(BadInput, match="packed"):
        PackedFile.open(path)


def test_a_file_that_is_cut_after_its_header_was_read_is_found(tmp_path: Path) -> None:
    packed = PackedFile.open(write(tmp_path / "packed"))
    packed.path.write_bytes(packed.path.read_bytes()[:-2000])
    with pytest.raises(BadInput, match="it ends early"):
        packed.load(LAST, nothing)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 4).t()[1:],
        torch.zeros(4, device="meta"),
        torch.zeros(4, dtype=torch.complex64),
        torch.zeros(4, 4).to_sparse(),
    ],
    ids=["strided", "meta", "complex", "sparse"],
)
def test_what_has_no_place_is_told(tensor: Any) -> None:
    assert not can_write(tensor)
    assert all(map(can_write, TENSORS.values()))
