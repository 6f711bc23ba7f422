"""The tables beside the records, read only for the cells that are drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from minivllm.analysis.cell import Cell
from minivllm.analysis.rows import Row, record_folder
from minivllm.bench.records.tables import read_table
from minivllm.errors import BadInput

if TYPE_CHECKING:
    import pandas as pd


def frames(
    cell: Cell, file: str, columns: Sequence[str], needed: Sequence[str] = ()
) -> Iterator[pd.DataFrame]:
    """A parquet file of each ok block that has it, in the blocks' order; torn and missing ones are
    passed over.

    Args:
        cell: whose records.
        file: name beside record.json.
        columns: to read, those that are there.
        needed: those of them that must be there, with a number in each row.
    """
    for row in cell.ok:
        if (table := frame(row, file, columns, needed)) is not None:
            yield table


def frame(
    row: Row, file: str, columns: Sequence[str], needed: Sequence[str] = ()
) -> pd.DataFrame | None:
    """The same of one record; None where it is missing, torn, or not the table that was
    recorded."""
    folder = record_folder(row)
    if folder is None:
        return None
    try:
        return read_table(folder, file, row.get(f"digests.{file}"), columns, needed).to_pandas()
    except BadInput:  # `Material.damaged` says so
        return None
