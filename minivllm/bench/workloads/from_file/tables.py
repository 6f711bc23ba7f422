"""Rows of tables: CSV and Parquet files, and the folders that Hugging Face's datasets saves."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minivllm.bench.workloads.from_file.prompt_row import TEXT_NAMES
from minivllm.bench.workloads.from_file.row_lengths import plain
from minivllm.errors import BadInput
from minivllm.platform import untrusted

PARQUET = b"PAR1"  # how such a file begins
STATE, SPLITS = "state.json", "dataset_dict.json"  # of a saved dataset, and of several
ROWS = 256  # of a table that are in memory at once
Row = dict[str, Any]


def csv_rows(path: Path, knob: str, text_columns: frozenset[str]) -> Iterator[tuple[str, Row]]:
    """Rows of a CSV file with a header, each with file and line number.

    An empty cell is null. Cells of other than text columns may hold JSON: a number, true, a list.

    Args:
        path: the file.
        knob: how messages begin that are about the whole file.
        text_columns: columns that are text whatever they look like, besides the usual ones.

    Raises:
        BadInput: naming the file and the line.
    """
    csv.field_size_limit(untrusted.MAX_LINE)  # of this process: the default is 128 KiB
    number = 1

    def lines() -> Iterator[str]:
        nonlocal number
        for number, line in enumerate(  # noqa: B007  # the last line that the reader has taken
            untrusted.read_text_lines(path, knob), start=1
        ):
            yield f"{line}\n"

    reader = csv.DictReader(lines(), strict=True)
    try:
        names = reader.fieldnames or []
        if len(set(names)) < len(names) or not all(name.strip() for name in names):
            raise BadInput(f"{path}:1: the header must name each column, and each once")
        for row in reader:
            where = f"{path}:{number}"
            if None in row or None in row.values():
                raise BadInput(
                    f"{where}: the row has more or fewer cells than the header's {len(names)}"
                )
            yield (
                where,
                {
                    name.strip(): _cell(cell, plain(name) in TEXT_NAMES or name in text_columns)
                    for name, cell in row.items()
                },
            )
    except csv.Error as error:
        raise BadInput(f"{path}:{number}: not valid CSV ({error})") from None


def _cell(cell: str, is_text: bool) -> Any:
    if not cell:
        return None
    if is_text or cell[0] not in "-0123456789[{tfn":
        return cell
    try:
        return json.loads(cell)
    except (ValueError, RecursionError):
        return cell


def parquet_rows(path: Path, knob: str) -> Iterator[tuple[str, Row]]:
    """Rows of a Parquet file, each with its number.

    Raises:
        BadInput: it is none, or damaged.
    """
    import pyarrow
    import pyarrow.parquet

    with untrusted.open_file(path, knob) as file:
        try:
            batches = pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=ROWS)
            rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, row in enumerate(rows, start=1):
                yield f"{path}: row {number}", row
        except (pyarrow.ArrowException, OSError) as error:
            raise BadInput(f"{knob} is no Parquet file that can be read ({error})") from None


def dataset_rows(folder: Path, knob: str, split: str | None) -> Iterator[tuple[str, Row]]:
    """Rows of a folder that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` has written, each
    with its number.

    Args:
        folder: the folder.
        knob: how messages begin that are about the whole folder.
        split: which of several; None where there is one.

    Raises:
        BadInput: it is no such folder, is damaged, or has no such split.
    """
    import pyarrow
    import pyarrow.ipc

    folder = _split(folder, knob, split)
    number = 0
    for path in dataset_files(folder, knob):
        with untrusted.open_file(path, knob) as file:
            try:
                for batch in pyarrow.ipc.open_stream(file):
                    for start in range(0, batch.num_rows, ROWS):
                        for row in batch.slice(start, ROWS).to_pylist():
                            number += 1
                            yield f"{folder.name}: row {number}", row
            except (pyarrow.ArrowException, OSError) as error:
                raise BadInput(f"{knob}: {path.name} cannot be read ({error})") from None


def dataset_files(folder: Path, knob: str) -> list[Path]:
    """The files of one saved dataset, in order. Raises BadInput where its state does not tell."""
    state = untrusted.read_object(folder / STATE, f"{knob}: {STATE}")
    files = state.get("_data_files")
    names = [
        str(entry.get("filename")) if isinstance(entry, dict) else ""
        for entry in (files if isinstance(files, list) else [])
    ]
    if not names or any(not name or Path(name).name != name for name in names):
        raise BadInput(f"{knob}: its {STATE} lists no files of a dataset")
    return [folder / name for name in names]


def saved_files(folder: Path) -> list[Path]:
    """All files of a saved dataset or several, by name; none where it is no such folder."""
    if not (folder / STATE).is_file() and not (folder / SPLITS).is_file():
        return []
    return sorted(
        path for pattern in ("*", "*/*") for path in folder.glob(pattern) if path.is_file()
    )


def _split(folder: Path, knob: str, split: str | None) -> Path:
    if (folder / STATE).exists():
        if split is not None:
            raise BadInput(f"workload.split={split}: {folder} holds one dataset, not several")
        return folder
    if not (folder / SPLITS).exists():
        raise BadInput(
            f"{knob} is a folder, and none that save_to_disk of Hugging Face's datasets has "
            f"written: it has neither {STATE} nor {SPLITS}"
        )
    value = untrusted.read_object(folder / SPLITS, f"{knob}: {SPLITS}").get("splits")
    names = [name for name in value if isinstance(name, str)] if isinstance(value, list) else []
    if split is None and len(names) == 1:
        split = names[0]
    if split is None or split not in names or Path(split).name != split:
        asked = "" if split is None else f"workload.split={split}: "
        raise BadInput(
            f"{asked}{knob} holds {', '.join(map(untrusted.printable, names)) or 'no'} splits; "
            "say which one with workload.split"
        )
    return folder / split
