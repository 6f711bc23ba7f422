"""Probes of the hardware's limits."""

from __future__ import annotations

import itertools
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from minivllm.bench.hardware import limits
from minivllm.bench.hardware.limits import best_seconds, last_level_cache, probe

BYTES, SECONDS = limits.PROBE_BYTES, limits.PROBE_SECONDS


@pytest.fixture(autouse=True)
def _as_users_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests probe briefly."""
    monkeypatch.setattr(limits, "PROBE_BYTES", BYTES)
    monkeypatch.setattr(limits, "PROBE_SECONDS", SECONDS)


def test_cache_size_is_the_last_level(tmp_path: Path) -> None:
    for i, (level, size) in enumerate(((1, "48K"), (2, "2048K"), (3, "32M"))):
        folder = tmp_path / f"index{i}"
        folder.mkdir()
        (folder / "level").write_text(f"{level}\n")
        (folder / "size").write_text(f"{size}\n")
    assert last_level_cache(tmp_path) == 32 << 20


@pytest.mark.parametrize("dtype", ["float32", "int8", "float8_e4m3fn"])
def test_the_probe_measures_something_plausible(
    monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setattr(limits, "PROBE_SECONDS", 0.01)
    monkeypatch.setattr(limits, "_probe_size", lambda device: 64 << 20)
    monkeypatch.setattr(limits, "_square_sizes", lambda device: [256, 512])
    found, notes = probe("cpu", dtype)
    assert found.bandwidth_bytes_per_s is not None and 1e8 < found.bandwidth_bytes_per_s < 1e13
    assert found.matrix_flops_per_s is not None and 1e8 < found.matrix_flops_per_s < 1e15
    assert found.matrix_dtype == dtype
    assert len(notes) == 1 and "64 MiB only" in notes[0]


def test_two_products_are_probed_where_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_free", lambda device: 1 << 40)
    assert limits._square_sizes("cpu") == [1024, 2048]
    assert limits._square_sizes("cuda") == [4096, 8192]


@pytest.mark.parametrize(
    ("free", "rated", "words"),
    [(40 << 20, True, "with a small product only"), (10 << 20, False, "not at all")],
)
def test_what_does_not_fit_is_not_probed(
    monkeypatch: pytest.MonkeyPatch, free: int, rated: bool, words: str
) -> None:
    """A cache that fills the device must not end a run that could be made."""
    monkeypatch.setattr(limits, "PROBE_SECONDS", 0.01)
    monkeypatch.setattr(limits, "_free", lambda device: free)
    found, notes = probe("cpu", "float32")
    assert found.bandwidth_bytes_per_s is None and (found.matrix_flops_per_s is not None) == rated
    assert f"the matrix rate was probed {words}: too little free memory" in notes


@pytest.mark.parametrize(
    ("first_s", "others_s", "tried", "best"),
    [
        (0.001, [0.003, 0.002, 0.001, 0.002], 8, 0.001),  # all eight
        (1.0, [0.01, 0.02, 0.03], 8, 0.01),  # slow only until it is warm
        (0.2, [0.2, 0.1, 0.2, 0.1], 3, 0.1),  # over PROBE_SECONDS after two
        (0.7, [0.7, 0.1], 1, 0.7),  # each of them is
        (0.7, [0.1, 0.1, 0.2, 0.01], 3, 0.1),  # only the first is
    ],
)
def test_what_takes_long_is_tried_less_often(
    monkeypatch: pytest.MonkeyPatch, first_s: float, others_s: list[float], tried: int, best: float
) -> None:
    """PROBE_SECONDS is 0.3. The first try does not count; the last of the others is repeated."""
    now, durations = 0.0, itertools.chain([first_s], others_s, itertools.repeat(others_s[-1]))
    calls = 0

    def action() -> None:
        nonlocal now, calls
        now += next(durations)
        calls += 1

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    assert best_seconds(action, lambda: None) == pytest.approx(best)
    assert calls == 1 + tried


@pytest.mark.parametrize(
    ("dtype", "timed"),
    [("float32", ["float32"]), ("bfloat16", ["bfloat16", "own", "float32"])],
)
def test_the_matrix_rate_is_that_of_the_fastest_product(
    monkeypatch: pytest.MonkeyPatch, dtype: str, timed: list[str]
) -> None:
    """Each is timed once a size: on a CPU also float32, in which one without kernels for less is
    fastest."""
    import torch

    seen: list[str] = []

    def seconds(product: Any, synchronise: Any) -> float:
        name = "own" if product is own else str(product.args[0].dtype).removeprefix("torch.")
        seen.append(name)
        return 0.5 if name == "float32" else 2.0

    def own() -> None: ...

    monkeypatch.setattr(limits, "best_seconds", seconds)
    monkeypatch.setattr(limits, "_own_products", lambda a, b: [own] * (dtype == "bfloat16"))
    assert limits._matrix_rate(torch, "cpu", dtype, [1024, 2048], lambda: None) == 2 * 2048**3 / 0.5
    assert seen == timed * 2


def test_every_narrow_format_is_among_the_limits() -> None:
    """A rate that one of the engine's own products could pass would be no limit."""
    import torch

    from minivllm.kernels.cpu.linear import Format

    kernels = limits._cpu_kernels("cpu")
    if kernels is None or not kernels.has_linear:
        pytest.skip("no C++ products on this processor")
    a, b = torch.randn(2, 64, 64, dtype=torch.bfloat16)
    products = limits._own_narrow_products("int8", a, b)
    forms = [product.func.form for product in products if isinstance(product, partial)]
    assert forms == [int(form) for form in Format if form.is_narrow]
    for product in products:
        made = product()
        assert isinstance(made, torch.Tensor)
        assert made.shape == (64, 64)
        assert made.isfinite().all()


@pytest.mark.parametrize("kernels", [True, False])
def test_memory_is_also_read_as_the_kernels_read_weights(
    monkeypatch: pytest.MonkeyPatch, kernels: bool
) -> None:
    """A limit that an engine could pass would be none. Each read is timed once; the last one is the
    fastest here."""
    import torch

    seconds = iter([4.0, 3.0, 2.0, 1.0])
    read = []

    def timed(action: Any, synchronise: Any, calls: int) -> float:
        read.append(action())
        return next(seconds)

    monkeypatch.setattr(limits, "best_seconds", timed)
    if not kernels:
        monkeypatch.setattr(limits, "_cpu_kernels", lambda device: None)
    found = limits._cpu_kernels("cpu")
    own = found is not None and found.has_linear
    assert limits._bandwidth(torch, "cpu", 3 << 20, lambda: None) == (3 << 20) / (
        1.0 if own else 2.0
    )
    assert len(read) == (4 if own else 3)
    if own:
        assert read[-1].shape == (1, (3 << 20) // 2048)  # 1024 inputs of two bytes for each output


def test_calls_in_a_row_share_the_time_of_a_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launch and a wait take besides must not count: here each wait costs as much as five
    calls."""
    now, waits = 0.0, 0

    def call() -> None:
        nonlocal now
        now += 0.004

    def wait() -> None:
        nonlocal now, waits
        now += 0.02
        waits += 1

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    assert best_seconds(call, wait, tries=3) == pytest.approx(0.024)
    assert best_seconds(call, wait, tries=3, calls=10) == pytest.approx(0.006)
    assert waits == 8  # one try more than counts, each time
