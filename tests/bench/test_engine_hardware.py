"""What is waited for before a measured window."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minivllm.bench.engine_hardware import MOST_WARM_UPS, EngineHardware
from minivllm.bench.hardware.gpu import NullGpu


class Clocked(NullGpu):
    """A GPU whose clock has these values, in turn."""

    def __init__(self, clocks: list[float | None], greatest: float | None = None) -> None:
        super().__init__()
        self._clocks: Iterator[float | None] = iter(clocks)
        self._greatest = greatest

    def describe(self) -> dict[str, Any]:
        return {"max_sm_mhz": self._greatest}

    def sample(self, pids: Any) -> dict[str, float | int | None]:
        return {"gpu_sm_mhz": next(self._clocks)}


@pytest.mark.parametrize(
    ("gpu", "times"),
    [
        (NullGpu(), 1),
        (Clocked([None]), 1),
        (Clocked([1900], greatest=1980), 1),
        (Clocked([1200, 1950], greatest=1980), 2),
        (Clocked([1980, 1980]), 2),
        (Clocked([345, 1200, 1950, 1980]), 4),
        (Clocked([345, None]), 2),
        (Clocked([100.0 * 2**i for i in range(20)]), MOST_WARM_UPS),
    ],
)
def test_a_clock_that_rises_is_waited_for(gpu: NullGpu, times: int) -> None:
    hardware = EngineHardware.__new__(EngineHardware)
    hardware._gpu = gpu
    lasted = iter(range(1, 100))
    assert hardware.warmed_up(lambda: float(next(lasted))) == 1.0  # the first batch's seconds
    assert next(lasted) == times + 1


def test_without_a_warm_up_nothing_raises_the_clock() -> None:
    hardware = EngineHardware.__new__(EngineHardware)
    hardware._gpu = Clocked([345])
    assert hardware.warmed_up(lambda: None) is None


@pytest.mark.parametrize(
    ("device", "capability", "release"),
    [("cpu", (9, 0), None), ("cuda", (9, 0), "12.8"), ("cuda:1", (10, 0), "13.1")],
)
def test_the_assembler_is_that_of_the_gpu(
    device: str,
    capability: tuple[int, int],
    release: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old, new = SimpleNamespace(version="12.8"), SimpleNamespace(version="13.1")
    tools = SimpleNamespace(ptxas=old, ptxas_blackwell=new)
    triton = SimpleNamespace(knobs=SimpleNamespace(nvidia=tools))
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(EngineHardware, "device", property(lambda self: device))
    hardware = EngineHardware.__new__(EngineHardware)
    assert hardware.assembler == release
    del tools.ptxas, tools.ptxas_blackwell
    assert hardware.assembler is None
