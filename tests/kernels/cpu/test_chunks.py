"""Memory that packed weights share: its pages, what it holds, and when it is freed."""

from __future__ import annotations

import gc
import sys

import pytest
import torch
from torch import Tensor

from minivllm.kernels.cpu import chunks
from minivllm.kernels.cpu.chunks import CHUNK, gathered
from minivllm.kernels.cpu.library import Kernels
from minivllm.kernels.cpu.linear import Format, PanelLinear
from tests.memory import in_large_pages


def nothing(tensor: Tensor) -> None:
    """Asks for no pages."""


def pieces(*rows: int, width: int = 100) -> list[Tensor]:
    return [torch.randint(256, (count, width), dtype=torch.uint8) for count in rows]


@pytest.mark.parametrize("rows", [(3,), (1, 4, 2)])
def test_weights_are_what_their_pieces_were_side_by_side(
    rows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "_last", None)
    weights = [pieces(*rows) for _ in range(3)]
    found = [gathered(weight, nothing) for weight in weights]
    for weight, whole in zip(weights, found, strict=True):
        assert torch.equal(whole, torch.cat(weight)) and whole.is_contiguous()
        assert whole.data_ptr() % 64 == 0
    begins = [whole.data_ptr() for whole in found]
    step = -(-found[0].nbytes // 64) * 64
    assert begins[2] - begins[1] == step


def test_a_chunk_is_freed_with_the_last_of_its_weights() -> None:
    first, second = gathered(pieces(2), nothing), gathered(pieces(2), nothing)
    assert chunks._last is not None
    chunk = chunks._last
    del first
    gc.collect()
    assert chunk() is not None
    second.fill_(7)
    del second
    gc.collect()
    assert chunk() is None
    assert gathered(pieces(2), nothing).shape == (2, 100)  # in another


def test_what_does_not_fit_begins_another_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK", 4096)
    monkeypatch.setattr(chunks, "_last", None)
    given = [pieces(30) for _ in range(3)]  # 3,000 bytes each
    found = [gathered(weight, nothing) for weight in given]
    assert all(torch.equal(whole, weight[0]) for whole, weight in zip(found, given, strict=True))
    assert len({whole.data_ptr() % 4096 for whole in found}) == 1


def test_a_large_weight_stays_where_it_is() -> None:
    asked: list[Tensor] = []
    large = torch.empty(1, CHUNK, dtype=torch.uint8)
    assert gathered([large], asked.append) is large and asked == [large]


@pytest.mark.skipif(sys.platform != "linux", reason="pages of 2 MB are asked for on Linux")
def test_weights_lie_in_pages_of_2_mb_from_end_to_end(panels: Kernels) -> None:
    shape, form = (1000, 1024), Format.BFLOAT16
    layers = [
        PanelLinear(panels, form, [panels.pack(torch.randn(shape).bfloat16(), form)], shape, None)
        for _ in range(8)
    ]
    stored = [layer.weight for layer in layers]
    large = in_large_pages(stored)
    if not large:
        pytest.skip("the system gives no pages of 2 MB")
    assert large >= sum(tensor.nbytes for tensor in stored) - 2 * (1 << 21)  # all but both ends
