"""What the other tests here stand on: a GPU refuses tensors of the host, and torch says where the
host waits for it.

They hold of the pretended GPU (tests/pretended_gpu.py) as of a real one.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "mixed",
    [
        lambda here, there: there + here,
        lambda here, there: torch.nn.functional.linear(there, here),
        lambda here, there: torch.cat((there, here)),
        lambda here, there: there.index_select(0, torch.tensor([1])),
        lambda here, there: torch.stack((there[0, 0], torch.tensor(1.0))),
        lambda here, there: here[torch.tensor([1], device="cuda")],
        lambda here, there: torch.where(there > 0, there, here),
    ],
)
def test_tensors_of_the_host_are_refused(mixed: Callable[[Tensor, Tensor], Tensor]) -> None:
    here = torch.ones(3, 3)
    with pytest.raises(RuntimeError):
        mixed(here, here.cuda())


@pytest.mark.parametrize(
    "waits",
    [
        lambda there: there.sum().item(),
        lambda there: there.tolist(),
        lambda there: bool(there.any()),
        lambda there: there.cpu(),
        lambda there: there.nonzero(),
        lambda there: there[there > 0],
        lambda there: there[[0, 2]],
        lambda there: there[torch.tensor(1, device="cuda")],
        lambda there: there[torch.tensor([1])],
        lambda there: there.__setitem__(1, 7.0),
        lambda there: torch.tensor([1.0], device="cuda"),
        lambda there: torch.tensor(1.0).cuda(),
        lambda there: torch.where(there > 0),
        lambda there: there.long().bincount(),
    ],
)
def test_waits_are_seen(waits: Callable[[Tensor], object]) -> None:
    there = torch.ones(3).cuda()
    waits(there)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            waits(there)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_does_not_wait_is_let_through() -> None:
    pinned = torch.ones(3).pin_memory()
    back = torch.empty(3, pin_memory=True)
    event = torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        there = pinned.to("cuda", non_blocking=True) * 2
        there[1:2] = 7.0
        back.copy_(there.masked_fill_(there > 6, 5.0), non_blocking=True)
        event.record()
        event.synchronize()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert back.tolist() == [2, 5, 2]


def test_a_graph_repeats_operations_and_lets_nobody_wait() -> None:
    calls = []
    x = torch.ones(3).cuda()

    def step() -> Tensor:
        calls.append(1)
        return x * 2 + torch.arange(3, device="cuda").add_(1)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for factor in (5.0, 7.0):
        x.copy_(torch.full((3,), factor))
        graph.replay()
        assert out.tolist() == [2 * factor + 1, 2 * factor + 2, 2 * factor + 3]
    assert len(calls) == 2
