"""Reading records back: plain dictionaries for the harness, a pandas frame for people."""

from __future__ import annotations

import glob
import json
import os
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.bench.storage import ASIDE, RECORD
from minivllm.errors import BadInput

if TYPE_CHECKING:
    import pandas

PathLike = str | Path
REQUIRED = ("schema_version", "run_id", "cell_id", "status")


def record_files(paths: PathLike | Iterable[PathLike]) -> list[Path]:
    """Every record.json below the given places, sorted, each once.

    Args:
        paths: a record directory, a sweep's folder, the root of all records, a record.json, a glob
            pattern of any of these, or a list of such.

    Raises:
        BadInput: a place does not exist or a pattern matches nothing.
    """
    found: set[Path] = set()
    for place in [paths] if isinstance(paths, (str, Path)) else list(paths):
        path = Path(os.path.expanduser(place))
        matches = [path] if path.exists() else [Path(name) for name in glob.glob(str(path))]
        if not matches:
            raise BadInput(f"no such file or folder: {place}; give a folder of records, such as runs/<name>")
        for match in matches:
            found.update(_below(match))
    return sorted(found)


def _below(place: Path) -> Iterator[Path]:
    if place.is_file():
        yield place
    elif (place / RECORD).exists():
        yield place / RECORD
    else:
        yield from (p for p in place.glob(f"*/{RECORD}") if not p.parent.name.startswith(ASIDE))
        yield from (p for p in place.glob(f"*/*/{RECORD}") if not p.parent.name.startswith(ASIDE))


def scan(paths: PathLike | Iterable[PathLike]) -> tuple[list[dict[str, Any]], list[str]]:
    """Records as dictionaries, each with its `directory` added, and the files that are not records."""
    records, unreadable = [], []
    for path in record_files(paths):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            whole = isinstance(record, dict) and all(record.get(key) is not None for key in REQUIRED)
            whole = whole and _numbers(record.get("metrics"))
        except (OSError, ValueError):
            whole = False
        if whole:
            records.append({**record, "directory": str(path.parent)})
        else:
            unreadable.append(str(path))
    if unreadable:
        warnings.warn(f"{len(unreadable)} unreadable record(s) left out: {unreadable[0]} ...", stacklevel=3)
    return records, unreadable


def _numbers(metrics: Any) -> bool:
    if isinstance(metrics, dict):
        return all(map(_numbers, metrics.values()))
    return metrics is None or isinstance(metrics, int | float)


def read_records(paths: PathLike | Iterable[PathLike]) -> list[dict[str, Any]]:
    """Records as dictionaries, each with its `directory` added; unreadable ones are left out, with a warning."""
    return scan(paths)[0]


def flatten(record: dict[str, Any]) -> dict[str, Any]:
    """One level of columns: "metrics.ttft_ms.p50", "config.batching.max_num_seqs", "choices.quant"."""
    columns: dict[str, Any] = {}

    def visit(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                visit(f"{prefix}.{key}" if prefix else str(key), item)
        else:
            columns[prefix] = value

    config = record.get("config") or {}
    visit("", {key: value for key, value in record.items() if key != "config"})
    visit("choices", config.get("choices") or {})
    visit("config", {key: value for key, value in config.items() if key != "choices"})
    return columns


def load_records(paths: PathLike | Iterable[PathLike]) -> pandas.DataFrame:
    """A frame with a row a record and flattened columns; failed cells are rows like any other.

    Args:
        paths: as for `record_files`.

    Returns:
        The frame; `frame.attrs["unreadable"]` lists the files that were left out.

    Raises:
        BadInput: a place does not exist.
    """
    import pandas

    records, unreadable = scan(paths)
    frame = pandas.DataFrame([flatten(record) for record in records])
    frame.attrs["unreadable"] = unreadable
    return frame
