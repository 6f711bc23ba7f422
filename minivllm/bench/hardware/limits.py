"""The hardware's limits as measured: bandwidth and matrix rate, on the run's own threads."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minivllm.bench.hardware.readings import Roofline

PROBE_BYTES = 1 << 30
MIN_PROBE_BYTES = 1 << 26
PROBE_SECONDS = 0.3  # budget of one probe, after its first tries
# for each number of a square product: two of float32, and three as they are multiplied
PRODUCT_BYTES = 16
GPU_CALLS = 8  # of a read or a copy in a row: one alone takes a fraction of a millisecond there


def last_level_cache(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int | None:
    """Bytes of the CPU's last-level cache; None where the system does not say."""
    sizes: dict[int, int] = {}
    for index in root.glob("index*"):
        try:
            level = int((index / "level").read_text())
            match = re.fullmatch(r"(\d+)([KMG]?)", (index / "size").read_text().strip())
        except (OSError, ValueError):
            continue
        if match:
            sizes[level] = int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]
    if sizes:
        return sizes[max(sizes)]
    try:
        return os.sysconf("SC_LEVEL3_CACHE_SIZE") or None
    except (ValueError, OSError, AttributeError):
        return None


def higher(first: Roofline, second: Roofline) -> Roofline:
    """Of two probes the higher limits."""
    bandwidths = (first.bandwidth_bytes_per_s or 0.0, second.bandwidth_bytes_per_s or 0.0)
    rates = (first.matrix_flops_per_s or 0.0, second.matrix_flops_per_s or 0.0)
    return Roofline(max(bandwidths) or None, max(rates) or None, first.matrix_dtype)


def best_seconds(
    action: Callable[[], object], synchronise: Callable[[], object], tries: int = 8, calls: int = 1
) -> float:
    """Shortest time of several tries, after one that does not count; of one try, where that takes
    long.

    Args:
        action: what is timed.
        synchronise: waits for the device.
        tries: most of them; three where they take longer than PROBE_SECONDS, and one where each of
            them does.
        calls: in a try, whose time is shared: where one is short, a launch and a wait for a GPU
            would count.
    """
    begin = time.perf_counter()
    action()
    synchronise()
    best, deadline = float("inf"), time.perf_counter() + PROBE_SECONDS
    least = 1 if deadline - begin > 2 * PROBE_SECONDS else 3
    for attempt in range(1, tries + 1):
        start = time.perf_counter()
        for _ in range(calls):
            action()
        synchronise()
        best = min(best, (time.perf_counter() - start) / calls)
        if attempt >= least and time.perf_counter() > deadline:
            break
    return best


SMALL, LOOP_FLOPS = 256, 3e9  # a product's size, and more than a plain loop does a second


def probe(device: str, dtype: str) -> tuple[Roofline, list[str]]:
    """Measure this machine's memory bandwidth and matrix rate, on the run's own threads. Needs
    torch.

    Args:
        device: "cpu" or "cuda...".
        dtype: compute dtype, or "int8" or "float8_e4m3fn" where some layers multiply these.

    Returns:
        The measured limits, and notes (a probe smaller than 1 GiB, say). About 1-2 s.
    """
    import torch

    cuda = device.startswith("cuda")
    synchronise = torch.cuda.synchronize if cuda else lambda: None
    notes: list[str] = []
    size = _probe_size(device)
    if size < PROBE_BYTES:
        notes.append(f"bandwidth was probed over {size >> 20} MiB only: too little free memory")
    result = Roofline(matrix_dtype=dtype)
    with torch.inference_mode():
        if size >= MIN_PROBE_BYTES:
            result.bandwidth_bytes_per_s = _bandwidth(torch, device, size, synchronise)
        sizes = _square_sizes(device)
        if len(sizes) < 2:
            notes.append(
                "the matrix rate was probed "
                f"{'with a small product only' if sizes else 'not at all'}: too little free "
                "memory"
            )
        result.matrix_flops_per_s = _matrix_rate(torch, device, dtype, sizes, synchronise)
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return result, notes


def _free(device: str) -> int:
    """Bytes of the device's memory that are free."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info()[0])
    import psutil

    return int(psutil.virtual_memory().available)


def _probe_size(device: str) -> int:
    """Bytes to read: 1 GiB, or half of what is free."""
    return min(PROBE_BYTES, _free(device) // 2 >> 20 << 20)


def _square_sizes(device: str) -> list[int]:
    """Of the matrices to multiply: two, but for those that do not fit beside a large cache."""
    free = _free(device)
    return [
        n
        for n in ((4096, 8192) if device.startswith("cuda") else (1024, 2048))
        if PRODUCT_BYTES * n * n < free
    ]


def _bandwidth(torch: Any, device: str, size: int, synchronise: Callable[[], object]) -> float:
    """Bytes a second of the fastest plain read of a buffer that is larger than any cache but this
    one's."""
    # written, so that its pages exist
    floats = torch.ones(size // 4, dtype=torch.float32, device=device)
    kernels = _cpu_kernels(device)
    if kernels is not None:
        kernels.use_huge_pages_(floats)  # as weights are, which are read faster so
    integers = floats.view(torch.int32)
    half = floats.numel() // 2
    # Which reduction is fastest depends on the build of torch; each of them reads every byte once.
    reads = [
        lambda: torch.dot(floats[:half], floats[half:]),
        lambda: torch.amax(integers),
        lambda: torch.sum(floats),
        *_own_reads(torch, kernels, floats),
    ]
    calls = GPU_CALLS if floats.is_cuda else 1
    return size / min(best_seconds(read, synchronise, calls=calls) for read in reads)


def _matrix_rate(
    torch: Any, device: str, dtype: str, sizes: list[int], synchronise: Callable[[], object]
) -> float | None:
    """Operations a second of a square matrix product in the compute dtype, by whichever kernel and
    size is fastest.

    The product is that of a linear layer: a processor may have no kernel for others. One that
    multiplies nothing smaller than float32 is fastest in that. Beside layers that multiply in 8
    bits there are others.
    """
    cuda = device.startswith("cuda")
    best, narrow = 0.0, dtype in ("int8", "float8_e4m3fn")
    for n in sizes:
        exact = [torch.randn(n, n, device=device) for _ in range(2)]
        a, b = (x.to(torch.bfloat16 if narrow else getattr(torch, dtype)) for x in exact)
        linear = torch.nn.functional.linear
        products: list[Callable[[], object]] = [
            functools.partial(linear, a, b),
            *_own_products(a, b),
        ]
        if narrow and (cuda or _has_kernel(torch, dtype)):
            products.append(_narrow_product(torch, dtype, *exact))
        if narrow:
            products += _own_narrow_products(dtype, a, b)
        if not cuda and dtype != "float32":
            products.append(functools.partial(linear, *exact))
        best = max(best, *(2 * n**3 / best_seconds(product, synchronise) for product in products))
    return best or None


def _has_kernel(torch: Any, dtype: str) -> bool:
    """Whether this processor multiplies in 8 bits by a kernel: some have a plain loop for it, which
    takes minutes at the sizes of the probe."""
    product = _narrow_product(torch, dtype, *(torch.randn(SMALL, SMALL) for _ in range(2)))
    product()  # the first makes its kernel
    begin = time.perf_counter()
    product()
    return 2 * SMALL**3 / (time.perf_counter() - begin) > LOOP_FLOPS


def _narrow_product(torch: Any, dtype: str, a: Any, b: Any) -> Callable[[], object]:
    """The product in 8 bits, as quantised layers have it."""
    if dtype == "int8":
        largest = 127 / max(a.abs().max(), b.abs().max())
        return functools.partial(
            torch._int_mm, (a * largest).to(torch.int8), (b * largest).to(torch.int8).t()
        )
    one = torch.ones((), device=a.device)
    rounded = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    return functools.partial(
        torch._scaled_mm, *rounded, scale_a=one, scale_b=one, out_dtype=torch.bfloat16
    )


def _own_reads(torch: Any, kernels: Any, memory: Any) -> list[Callable[[], object]]:
    """A read as the C++ kernels read weights for one token, who ask for memory early: on some
    processors the fastest.

    Args:
        kernels: the C++ kernels or None.
        memory: of a multiple of 1 MiB, taken as a weight of bfloat16.
    """
    if kernels is None or not kernels.has_linear:
        return []
    from minivllm.kernels.cpu.linear import PANEL, Format

    inputs = 1024
    panels = memory.view(torch.uint8).view(-1, 2 * inputs * PANEL)
    x = torch.zeros(1, inputs, dtype=torch.bfloat16)
    outputs = len(panels) * PANEL
    return [
        lambda: kernels.linear(x, panels, None, None, None, int(Format.BFLOAT16), outputs, inputs)
    ]


def _own_products(a: Any, b: Any) -> list[Callable[[], object]]:
    """The product by the C++ kernels, where there are any: a limit that an engine could pass would
    be none."""
    kernels = _cpu_kernels(a.device.type)
    if kernels is None or not kernels.has_linear or str(a.dtype) != "torch.bfloat16":
        return []
    from minivllm.kernels.cpu.linear import Format, PanelLinear

    form = Format.BFLOAT16
    layer = PanelLinear(kernels, form, [kernels.pack(b.clone(), form)], tuple(b.shape), None)
    return [lambda: layer(a)]


def _own_narrow_products(dtype: str, a: Any, b: Any) -> list[Callable[[], object]]:
    """The products of 8-bit integers by the C++ kernels, where there are any, with weights in 8 and
    in 4 bits: these are faster on processors whose sums of 16 bits they cannot overflow."""
    kernels = _cpu_kernels(a.device.type)
    if kernels is None or not kernels.has_linear or dtype != "int8":
        return []
    from minivllm.kernels.cpu.linear import Format, PanelLinear

    shape, scales = tuple(b.shape), a.new_ones(1, len(b))
    eight, four = b.mul(20).clamp(-127, 127).char(), b.mul(2).add(8).clamp(0, 15).byte()
    weights = [
        (Format.INT8_QUADS, eight, None),
        (Format.INT4_QUADS, four, None),
        (Format.UINT4_QUADS, four, scales),
    ]
    layers = (
        PanelLinear(kernels, form, [kernels.pack(codes, form)], shape, None, scales, minima)
        for form, codes, minima in weights
    )
    return [functools.partial(layer, a) for layer in layers]


def _cpu_kernels(device: str) -> Any:
    """The C++ kernels, where there are any."""
    if device == "cpu":
        from minivllm.kernels.cpu import library

        with contextlib.suppress(RuntimeError, OSError, ImportError):
            return library.load()
    return None
