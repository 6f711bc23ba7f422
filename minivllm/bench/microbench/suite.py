"""All cases of a model on a device, measured into the rows of a record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from minivllm.bench.hardware.readings import Roofline
from minivllm.bench.microbench import attention, linear, mixture, sampling, small
from minivllm.bench.microbench.case import Setting
from minivllm.bench.microbench.timing import measure
from minivllm.errors import first_line

PARTS = {
    "products": linear,
    "attention": attention,
    "small steps": small,
    "experts": mixture,
    "sampling": sampling,
}
CaseRow = dict[str, Any]


def rows(
    setting: Setting,
    limits: Mapping[str, Roofline],
    repeats: int,
    sample_s: float,
    synchronise: Callable[[], object],
) -> Iterator[CaseRow]:
    """A row a case. A case's memory is free when the next is made; what fails is a row that says
    so.

    Args:
        setting: where and on what shapes.
        limits: bandwidth and matrix rate, by the dtype of products.
        repeats: samples of each side.
        sample_s: least seconds of a sample.
        synchronise: waits for the device.
    """
    for name, part in PARTS.items():
        try:
            for case in part.cases(setting):
                try:
                    row = measure(case, limits[case.matrix_dtype], repeats, sample_s, synchronise)
                    row["from_memory"] = setting.is_from_memory(case)
                except Exception as error:
                    # out of memory, a kernel that does not compile, no such package
                    row = _failed(f"{case.kernel} ({case.part}, {case.rows} rows)", error)
                yield {"part_of": name, **row}
        except Exception as error:  # where a case was made: of this part there are no more
            yield {"part_of": name, **_failed(name, error)}


def _failed(kernel: str, error: Exception) -> CaseRow:
    return {"kernel": kernel, "ok": False, "error": first_line(error)}
