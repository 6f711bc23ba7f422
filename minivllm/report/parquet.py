"""The tables beside the records, read only for the cells that are drawn."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from minivllm.bench.storage import REQUESTS, STEPS, TELEMETRY
from minivllm.report.rows import Row, record_folder, status_of

if TYPE_CHECKING:
    import pandas as pd

    from minivllm.report.cells import Cell

MAGIC = b"PAR1"  # with which a whole file begins and ends


def damaged(row: Row) -> list[str]:
    """Tables of an ok record that are torn, or gone; of a simulated engine there is no telemetry."""
    folder = record_folder(row)
    if folder is None or status_of(row) != "ok":
        return []
    names = [REQUESTS, STEPS, *([TELEMETRY] if (folder / TELEMETRY).exists() else [])]
    return [str(folder / name) for name in names if not _whole(folder / name)]


def _whole(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            first = file.read(len(MAGIC))
            file.seek(-len(MAGIC), os.SEEK_END)
            return first == file.read() == MAGIC
    except OSError:
        return False


def frames(cell: Cell, file: str, columns: list[str] | None = None) -> Iterator[pd.DataFrame]:
    """A parquet file of each ok block that has it, in the blocks' order; torn and missing ones are passed over.

    Args:
        cell: whose records.
        file: name beside record.json.
        columns: to read, those that are there; None reads all.
    """
    for row in cell.ok:
        if (found := frame(row, file, columns)) is not None:
            yield found


def frame(row: Row, file: str, columns: list[str] | None = None) -> pd.DataFrame | None:
    """The same of one record; None where it is missing or torn."""
    folder = record_folder(row)
    if folder is None or not (folder / file).is_file():
        return None
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(folder / file) as table:
            wanted = None if columns is None else [n for n in columns if n in table.schema_arrow.names]
            return table.read(wanted).to_pandas()
    except (OSError, ValueError):  # pyarrow's own errors derive from these
        return None
