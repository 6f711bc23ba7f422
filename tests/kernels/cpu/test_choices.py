"""Which way multiplies how many rows: the faster one, kept in a file, and no bit is changed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from minivllm.kernels.cpu import choices
from minivllm.kernels.cpu.choices import BOUNDS, ROWS, best, choices_file, choose
from minivllm.kernels.cpu.library import Kernels
from minivllm.kernels.cpu.linear import PanelLinear
from minivllm.kernels.device import BuildContext
from minivllm.quant.int4 import Int4
from minivllm.quant.int8 import Int8

DAMAGED: dict[str, bytes] = {
    "empty": b"",
    "no JSON": b"\xff{",
    "a list": b"[]",
    "too deep": b"[" * 10_000,
    "too large": b"[" + b"0, " * (1 << 19) + b"0]",
    "another format": b'{"format": 2, "choices": {"KEY": 24}}',
    "no object": b'{"format": 1, "choices": [1]}',
    "a text": b'{"format": 1, "choices": {"KEY": "24"}}',
    "a flag": b'{"format": 1, "choices": {"KEY": true}}',
    "another number": b'{"format": 1, "choices": {"KEY": 25}}',
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(choices, "cache_folder", lambda: tmp_path)
    return tmp_path


def layer_of(kernels: Kernels, outputs: int = 192, method: type = Int4) -> PanelLinear:
    made = method(dtype="bfloat16", activations="int8").within(
        BuildContext(torch.device("cpu"), kernels)
    )
    layer = made.pack(torch.randn(outputs, 512).bfloat16(), torch.randn(outputs).bfloat16())
    assert isinstance(layer, PanelLinear)
    return layer


def scripted(limit: int) -> Callable[[PanelLinear, Tensor, int], float]:
    """A timer of a machine on which the way for few rows is faster up to a limit."""

    def seconds(layer: PanelLinear, x: Tensor, few_rows: int) -> float:
        if len(x) > few_rows:
            return 2.0
        return 1.0 if len(x) <= limit else 3.0

    return seconds


def not_again(layer: PanelLinear, x: Tensor, few_rows: int) -> float:
    pytest.fail("measured again")


@pytest.mark.parametrize(("limit", "chosen"), [*zip((0, *ROWS), BOUNDS, strict=True)])
def test_the_faster_way_is_chosen_and_kept(panels: Kernels, limit: int, chosen: int) -> None:
    layers = [layer_of(panels), layer_of(panels)]
    assert choose(panels, layers, scripted(limit)) == (2, None)
    assert [layer.few_rows for layer in layers] == [chosen, chosen]
    (kept,) = json.loads(choices_file().read_text())["choices"].items()
    assert kept[0].endswith("threads: INT4_QUADS 192 x 512, groups of 128, 4 scales and zeros")
    assert kept[1] == chosen and panels.variant in kept[0]
    again = layer_of(panels)
    assert choose(panels, [again], not_again) == (1, None)
    assert again.few_rows == chosen
    assert again.kernel_name.endswith(f"8-bit activations, few rows up to {chosen} as measured")


def test_no_bit_depends_on_the_choice(panels: Kernels) -> None:
    layer = layer_of(panels)
    x = torch.randn(300, 512).bfloat16()
    whole = layer(x)
    for bound in BOUNDS:
        layer.few_rows = bound
        for rows in (1, 2, 6, 7, 13, 48, 49, 97, 256, 300):
            assert torch.equal(layer(x[:rows]), whole[:rows]), (bound, rows)


def test_real_times_choose_one_of_the_bounds(panels: Kernels) -> None:
    layers = [layer_of(panels) for _ in range(3)]
    x = torch.randn(60, 512).bfloat16()
    before = [layer(x) for layer in layers]
    assert choose(panels, layers) == (3, None)
    assert {layer.few_rows for layer in layers} < {*BOUNDS}
    assert len({layer.few_rows for layer in layers}) == 1
    assert all(torch.equal(layer(x), old) for layer, old in zip(layers, before, strict=True))


def test_layers_with_one_way_are_left_alone(panels: Kernels) -> None:
    """Bytes have a second way only with the matrix unit, 16-bit activations none."""
    with_one_way = dataclasses.replace(panels, few_rows=lambda form: 0)
    layer = layer_of(panels, method=Int8)
    assert choose(with_one_way, [layer], not_again) == (0, None)
    assert layer.few_rows == -1 and not choices_file().exists()
    with_tiles = dataclasses.replace(panels, few_rows=lambda form: 6)
    x = torch.randn(60, 512).bfloat16()
    before = layer(x)
    assert choose(with_tiles, [layer], scripted(16)) == (1, None)
    assert layer.few_rows == 24 and torch.equal(layer(x), before)


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_measured_anew(panels: Kernels, damage: str) -> None:
    choose(panels, [layer_of(panels)], scripted(32))
    (key,) = json.loads(choices_file().read_text())["choices"]
    choices_file().write_bytes(DAMAGED[damage].replace(b"KEY", key.encode()))
    layer = layer_of(panels)
    assert choose(panels, [layer], scripted(8)) == (1, None)
    assert layer.few_rows == 12
    assert json.loads(choices_file().read_text())["choices"] == {key: 12}


def test_another_machine_s_choices_are_not_taken(
    panels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for change in ("none", "kernels", "processor", "threads"):
        with monkeypatch.context() as patch:
            kernels = panels
            if change == "kernels":
                kernels = dataclasses.replace(panels, variant="others")
            if change == "processor":
                patch.setattr(choices, "cpu_info", lambda names: "another")
            if change == "threads":
                patch.setattr(torch, "get_num_threads", lambda: 77)
            layer = layer_of(panels)
            choose(kernels, [layer], scripted(ROWS[len(found)]))
        found.append(layer.few_rows)
    assert found == list(BOUNDS[1:5])
    assert list(json.loads(choices_file().read_text())["choices"].values()) == found


def test_the_file_keeps_the_last_choices(panels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "MOST_KEPT", 2)
    for outputs in (64, 128, 192):
        choose(panels, [layer_of(panels, outputs)], scripted(4))
    kept = json.loads(choices_file().read_text())["choices"]
    assert [key.split(": ")[1].split(" x")[0] for key in kept] == [
        "INT4_QUADS 128",
        "INT4_QUADS 192",
    ]


def test_a_folder_that_cannot_be_written_is_told(
    panels: Kernels, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").touch()
    monkeypatch.setattr(choices, "cache_folder", lambda: folder / "file")
    layer = layer_of(panels)
    count, reason = choose(panels, [layer], scripted(8))
    assert (count, layer.few_rows) == (1, 12) and reason is not None and "file" in reason


def test_the_built_in_bound_stays_without_a_gain() -> None:
    even = {rows: (1.0, 1.0) for rows in ROWS}
    assert best(even, 48) == 48
    assert best({**even, 64: (1.0, 1.1)}, 48) == 48  # 1.7 % of all
    assert best({**even, 64: (1.0, 1.2)}, 48) == 96
    assert best({**even, 32: (1.2, 1.0)}, 48) == 1
