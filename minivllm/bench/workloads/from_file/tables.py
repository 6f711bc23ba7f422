"""Rows of tables: CSV, JSON and Parquet files, and the folders that Hugging Face's datasets saves;
and the count of what is not taken from them."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from minivllm.errors import BadInput
from minivllm.platform import text_files, untrusted

PARQUET = b"PAR1"  # how such a file begins
STATE, SPLITS = "state.json", "dataset_dict.json"  # of a saved dataset, and of several
ROWS = 256  # of a table that are in memory at once
NAME_LENGTH = 40  # most characters of a file's own names in a message
MOST_NOTES = 8  # of each counter


class Row(NamedTuple):
    """A row of a table.

    Args:
        where: file and line, or row, which begins messages.
        number: of the line or the row, from 1.
        value: a dict by columns; of a JSON file any value. Cells of a CSV file are texts.
        names_at: where its columns are named: the header's line, or `where`.
        names: of a CSV file all columns of the header, also those that the row has no cell of.
    """

    where: str
    number: int
    value: Any
    names_at: str
    names: Sequence[str] = ()


def detect(path: Path, knob: str, advice: str = "", otherwise: str = "jsonl") -> str:
    """The kind of a file that is there: parquet, list (one JSON list), jsonl or csv.

    Args:
        path: the file; one that gzip has packed is unpacked.
        knob, advice: as for `untrusted.open_file`.
        otherwise: the kind of a text that begins like no JSON and whose name does not end in .csv.

    Raises:
        BadInput: the file cannot be read.
    """
    begin = text_files.read_begin(path, knob, advice)
    if begin.startswith(PARQUET):
        return "parquet"
    first = begin.removeprefix(untrusted.BYTE_ORDER_MARK).lstrip()[:1]
    if first in (b"[", b"{"):
        return "list" if first == b"[" else "jsonl"
    return "csv" if path.name.lower().removesuffix(".gz").endswith(".csv") else otherwise


def read_rows(
    path: Path,
    kind: str,
    knob: str,
    advice: str = "",
    split: str | None = None,
    strict: bool = True,
) -> Iterator[Row]:
    """The rows of a table, one at a time.

    Args:
        path: the file, or the folder of a saved dataset.
        kind: parquet, list, jsonl, csv or dataset.
        knob, advice: as for `untrusted.open_file`.
        split: of a saved dataset, which of several; None where there is one.
        strict: of a CSV file: each name of the header is there once, each row has a cell for each,
            and quotes are around whole cells. Otherwise cells beyond the header are left out, a
            shorter row has no values for its last columns, and spaces may follow a comma.

    Raises:
        BadInput: naming the file and, where one is to blame, the line or the row.
    """
    if kind == "csv":
        return _csv_rows(path, knob, advice, strict)
    if kind == "jsonl":
        return json_rows(path, knob, advice)
    if kind == "list":
        return _numbered(f"{path}: entry", text_files.read_list(path, knob, advice))
    if kind == "parquet":
        return _parquet_rows(path, knob, advice)
    return _dataset_rows(path, knob, split)


def json_rows(
    path: Path, knob: str, advice: str = "", longest: int = text_files.MAX_LINE
) -> Iterator[Row]:
    """The values of a file with one a line; blank lines are skipped.

    Args:
        path: the file.
        knob, advice, longest: as for `text_files.read_lines`.

    Raises:
        BadInput: as `text_files.read_lines`; or a line is no JSON.
    """
    for number, line in enumerate(text_files.read_lines(path, knob, advice, longest), start=1):
        line = line.removeprefix(untrusted.BYTE_ORDER_MARK) if number == 1 else line
        if line.strip():
            where = f"{path}:{number}"
            what, rule = f"{where}: the line", "each line must be one JSON object"
            yield Row(where, number, untrusted.parse_json(line, what, rule), where)


def _numbered(what: str, values: Iterable[Any]) -> Iterator[Row]:
    for number, value in enumerate(values, start=1):
        where = f"{what} {number}"
        yield Row(where, number, value, where)


def check_once(header: Sequence[str], names: Iterable[str], where: str) -> None:
    """Raise BadInput, starting with `where`, if a header has one of the names twice."""
    counts = Counter(header)
    for name in names:
        if counts[name] > 1:
            raise BadInput(
                f"{where}: the header has {short_name(name)} twice; leave one of the columns out"
            )


def _csv_rows(path: Path, knob: str, advice: str, strict: bool) -> Iterator[Row]:
    """Rows of a file with a header; blank lines are skipped."""
    csv.field_size_limit(text_files.MAX_LINE)  # of this process: the default is 128 KiB
    file = str(path)
    lines = text_files.read_text_lines(path, knob, advice)
    ended = (f"{line}\n" for line in lines)
    reader = csv.reader(ended, strict=strict, skipinitialspace=not strict)
    try:
        header = next((cells for cells in reader if any(map(str.strip, cells))), [])
        names = [name.strip() for name in header]
        names_at = f"{path}:{reader.line_num}"
        if strict:
            check_once(names, filter(None, names), names_at)
        for cells in reader:
            number = reader.line_num
            where = f"{file}:{number}"
            if len(cells) != len(names):
                if len(cells) < 2 and not "".join(cells).strip():
                    continue
                if strict and len(cells) < len(names):
                    raise BadInput(cut_off(where, len(cells), len(names)))
                if strict:
                    raise BadInput(
                        f"{where}: the row has {len(cells)} cells and the header {len(names)}"
                    )
            yield Row(where, number, dict(zip(names, cells, strict=False)), names_at, names)
    except csv.Error as error:
        raise BadInput(f"{path}:{reader.line_num}: not valid CSV ({error})") from None


def cut_off(where: str, cells: int, columns: int) -> str:
    """The message about a row of a CSV file that is too short."""
    return f"{where}: {cells} of {columns} columns; is the file cut off?"


def _parquet_rows(path: Path, knob: str, advice: str) -> Iterator[Row]:
    from pyarrow.parquet import ParquetFile

    def batches(file: Any) -> Iterator[Any]:
        return ParquetFile(file).iter_batches(batch_size=ROWS)

    what = "{knob} is no Parquet file that can be read"
    yield from _numbered(f"{path}: row", _arrow_values([path], batches, knob, advice, what))


def _dataset_rows(folder: Path, knob: str, split: str | None) -> Iterator[Row]:
    """Rows of a folder that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` has written."""
    from pyarrow.ipc import open_stream

    folder = _split(folder, knob, split)
    what = "{knob}: {name} cannot be read"
    files = _dataset_files(folder, knob)
    yield from _numbered(f"{folder.name}: row", _arrow_values(files, open_stream, knob, "", what))


def _arrow_values(
    paths: Sequence[Path],
    batches: Callable[[Any], Iterable[Any]],
    knob: str,
    advice: str,
    what: str,
) -> Iterator[Any]:
    """The rows in several files.

    Args:
        paths: the files.
        batches: opens one.
        knob, advice: as for `untrusted.open_file`.
        what: how the message begins where a file is damaged.
    """
    from pyarrow import ArrowException

    for path in paths:
        with untrusted.open_file(path, knob, advice) as file:
            try:
                for batch in batches(file):
                    for start in range(0, batch.num_rows, ROWS):
                        yield from batch.slice(start, ROWS).to_pylist()
            except (ArrowException, OSError) as error:
                message = what.format(knob=knob, name=untrusted.printable(path.name))
                raise BadInput(f"{message} ({untrusted.printable(str(error))})") from None


def _dataset_files(folder: Path, knob: str) -> list[Path]:
    """The files of one saved dataset, in order. Raises BadInput where its state names none."""
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
        which = "" if split is None else f"workload.split={split}: "
        raise BadInput(
            f"{which}{knob} holds {', '.join(map(untrusted.printable, names)) or 'no'} splits; "
            "say which one with workload.split"
        )
    return folder / split


def short_name(key: str) -> str:
    """A file's own name for something, as it may be shown."""
    return untrusted.printable(key)[:NAME_LENGTH]


@dataclass
class Tally:
    """Counts of what a workload does not take from a file, so that nothing is lost unseen.

    Every entry that is read becomes a request or is counted in `left_out`. Keys are the words that
    follow the count in a record's notes, such as "requests were left out, longer than the context
    of 2048".
    """

    read: int = 0  # entries: lines, conversations, rows
    left_out: Counter[str] = field(default_factory=Counter)  # entries that make no request
    unused: Counter[str] = field(default_factory=Counter)  # parts of entries that make one

    def notes(self, workload: str, num_requests: int, requested: int | None) -> tuple[str, ...]:
        """Sentences for the record.

        Args:
            workload: name of the workload's option.
            num_requests: requests that the file gave.
            requested: `workload.num_requests`.
        """
        notes = [*_sentences(self.left_out), *_sentences(self.unused)]
        if requested is not None and num_requests < requested:
            notes.append(f"workload.num_requests={requested}, and the file gives {num_requests}")
        return tuple(f"workload={workload}: {note}" for note in notes)


def _sentences(counts: Counter[str]) -> list[str]:
    counted = [(words, count) for words, count in counts.items() if count]
    notes = [f"{count} {words}" for words, count in counted[:MOST_NOTES]]
    if others := counted[MOST_NOTES:]:
        notes.append(
            f"{sum(count for _, count in others)} of {len(others)} further kinds were not used"
        )
    return notes
