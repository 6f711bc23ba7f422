"""Which of two ways with equal bits multiplies how many rows: measured once on a machine, and kept.

Products of activations in 8 bits have a way for few rows and one for many (linear_int8.h). Which
one is faster depends on the processor and on the weight's shape, so a weight's rows for the first
way can be found by timing both on the weights themselves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from minivllm.errors import BadInput, first_line
from minivllm.kernels.cpu.library import Kernels
from minivllm.kernels.cpu.linear import PANEL, Format, PanelLinear
from minivllm.platform.devices import cpu_info
from minivllm.platform.files import cache_folder, write_json
from minivllm.platform.untrusted import read_object

# Seconds of one product: of a layer, rows [rows, in], and the rows up to which the first way is
# taken.
Timer = Callable[[PanelLinear, Tensor, int], float]

ROWS = (4, 8, 16, 32, 64, 128)  # of the products that are timed
BOUNDS = (1, 6, 12, 24, 48, 96, 256)  # that lie between these; 256 rows meet a weight at a time
LEAST_GAIN = 0.02  # of time, for which another bound than the kernel's own is chosen
REPEATS = 5
MOST_KEPT = 512  # choices in the file; the oldest are removed
_FORMAT = 1  # of the file
_MOST_BYTES = 1 << 20  # of a file that is read
_WEIGHTS = 1 << 21  # of a layer that are multiplied: a head has many more, of one kind


def choices_file() -> Path:
    """Where choices are kept, beside the folder of packed weights."""
    return cache_folder() / "kernel-choices.json"


def choose(
    kernels: Kernels, layers: Iterable[PanelLinear], seconds: Timer | None = None
) -> tuple[int, str | None]:
    """Set `few_rows` of the layers that have two ways; their results stay equal to the bit.

    Args:
        kernels: of the layers.
        layers: of one model; those of one shape share a choice.
        seconds: times a product.

    Returns:
        The number of layers that were set, and the reason why new choices are not kept.
    """
    machine = f"{kernels.variant}, {cpu_info('model name')}, {torch.get_num_threads()}"
    shapes: dict[str, list[PanelLinear]] = {}
    for layer in layers:
        if kernels.few_rows(layer.form):
            shapes.setdefault(f"{machine} threads: {_shape(layer)}", []).append(layer)
    known, new = read_choices(choices_file()), {}
    for key, same in shapes.items():
        if key not in known:
            own = kernels.few_rows(same[0].form)
            known[key] = new[key] = best(measure(same, seconds or _seconds), own)
        for layer in same:
            layer.few_rows = known[key]
            layer.kernel_name += f", few rows up to {layer.few_rows} as measured"
    count = sum(map(len, shapes.values()))
    return count, _keep(choices_file(), new) if new else None


def measure(layers: Sequence[PanelLinear], seconds: Timer) -> dict[int, tuple[float, float]]:
    """For each of ROWS the seconds of a product in the way for few rows, and in the other: medians
    of calls in turns, each with the next layer, as a step finds no weight in the nearest caches."""
    inputs = _inputs(layers[0])
    panels = max(_WEIGHTS // (inputs * PANEL), 2 * torch.get_num_threads())
    parts = [layer.first(panels * PANEL) for layer in layers]
    found = {}
    for rows in ROWS:
        x = torch.ones(rows, inputs, dtype=torch.bfloat16)
        times: tuple[list[float], list[float]] = ([], [])
        for call in range(2 * (REPEATS + 1)):
            is_many = call % 2
            bound = BOUNDS[0] if is_many else rows
            times[is_many].append(seconds(parts[call % len(parts)], x, bound))
        few, many = (median(one[1:]) for one in times)  # the first calls touch memory
        found[rows] = few, many
    return found


def best(times: Mapping[int, tuple[float, float]], own: int) -> int:
    """The bound of BOUNDS that takes the least time, of which each number of rows has an equal
    part.

    Args:
        times: see `measure`.
        own: the kernel's bound, which stays where another one gains less than LEAST_GAIN.
    """

    def cost(bound: int) -> float:
        pairs = times.items()
        return sum((few if rows <= bound else many) / min(few, many) for rows, (few, many) in pairs)

    found = min(BOUNDS, key=cost)
    return found if cost(found) < (1 - LEAST_GAIN) * cost(own) else own


def read_choices(path: Path) -> dict[str, int]:
    """The choices of a file, by machine and shape; those that are damaged are left out."""
    try:
        content = read_object(path, str(path), limit=_MOST_BYTES)
    except BadInput:
        return {}
    kept = content.get("choices") if content.get("format") == _FORMAT else None
    items = kept.items() if isinstance(kept, dict) else ()
    return {key: bound for key, bound in items if type(bound) is int and bound in BOUNDS}


def _keep(path: Path, new: Mapping[str, int]) -> str | None:
    """Add choices to a file, of which the last ones stay. Returns the reason where it cannot be
    written. Of two processes that write at once, one measures again at its next start."""
    whole = {**read_choices(path), **new}
    last = dict(list(whole.items())[-MOST_KEPT:])
    try:
        write_json(path, {"format": _FORMAT, "choices": last})
    except OSError as error:
        return first_line(error)
    return None


def _inputs(layer: PanelLinear) -> int:
    bytes_of_input = PANEL if layer.form == Format.INT8_QUADS else PANEL // 2
    return int(layer.weight.shape[1]) // bytes_of_input


def _shape(layer: PanelLinear) -> str:
    """What the time of a layer's products depends on."""
    assert layer.scales is not None  # activations in 8 bits are multiplied with integers
    return (
        f"{Format(layer.form).name} {layer.outputs} x {_inputs(layer)}, groups of {layer.group}, "
        f"{layer.scales.shape[1]} scales{'' if layer.zeros is None else ' and zeros'}"
    )


def _seconds(layer: PanelLinear, x: Tensor, few_rows: int) -> float:
    """Seconds of one product."""
    begin = time.perf_counter()
    layer.multiply(x, *layer.state[:-1], few_rows)
    return time.perf_counter() - begin
