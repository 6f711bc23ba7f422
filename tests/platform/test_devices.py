"""Fields of the processor, under the names that they have on each kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from minivllm.platform import devices
from minivllm.platform.devices import cpu_info

TEXT = (
    "processor\t: 0\nmodel name\t: One @ 2:1\nempty\t:\nflags\t\t: avx2 fma\n\n"
    "processor\t: 1\nmodel name\t: Two\nflags\t\t: none\n"
)


@pytest.mark.parametrize(
    ("names", "value"),
    [
        ("model name", "One @ 2:1"),
        ("flags|Features", "avx2 fma"),
        ("Features|flags", "avx2 fma"),
        ("empty", ""),
        ("model", ""),
    ],
)
def test_the_first_processor_s_field(
    names: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "CPU_INFO", tmp_path / "cpuinfo")
    devices.CPU_INFO.write_text(TEXT)
    assert cpu_info(names) == value


def test_another_system_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "CPU_INFO", tmp_path / "none")
    assert cpu_info("flags") == ""
