"""Knobs that older records lack."""

from __future__ import annotations

from pathlib import Path

import pytest

from minivllm.analysis.cells import gather, varying_columns
from minivllm.analysis.liveness import liveness
from minivllm.analysis.rows import Row, read_rows
from minivllm.bench.records.record import Record
from minivllm.config.compose import compose
from tests.report.synthetic import make_record, write


def record(block: int, **changes: object) -> Record:
    """One whose decoding, cache and runtime are those of the present version, at their defaults."""
    made = make_record(block=block, run_id=f"r{block}{len(changes)}".ljust(12, "0"))
    made.config |= {group: dict(compose([])[group]) for group in ("decoding", "cache", "runtime")}
    for name, value in changes.items():
        group, _, knob = name.partition("__")
        if value is None:
            del made.config[group][knob]
        else:
            made.config[group][knob] = value
    return made


def rows_of(tmp_path: Path, *records: Record) -> list[Row]:
    return read_rows(write(tmp_path / "runs", list(records), parquet=False))[0]


OLD = {"decoding__bad_words": None, "decoding__skip_special_tokens": None, "cache__eviction": None}


def test_a_knob_that_an_older_record_lacks_is_off(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, record(0, **OLD), record(1))
    assert all(row["config.decoding.bad_words"] == [] for row in rows)
    (cell,) = gather(rows)
    assert len(cell.rows) == 2
    other = [{**row, "cell_id": "other", "arm": "other"} for row in rows[1:]]
    cells = gather([rows[0], *other])
    assert len(cells) == 2 and varying_columns(cells) == {} and liveness(cells) == []


def test_what_the_newer_record_asks_for_is_a_difference(tmp_path: Path) -> None:
    asked = record(1, decoding__bad_words=["no"], cache__eviction="heavy_hitters")
    asked.cell_id = asked.arm = "asked"
    cells = gather(rows_of(tmp_path, record(0, **OLD), asked))
    assert [cell.varying for cell in cells] == [
        {"cache.eviction": "none", "decoding.bad_words": "[]"},
        {"cache.eviction": "heavy_hitters", "decoding.bad_words": "[no]"},
    ]


def test_a_default_that_does_something_was_not_done_before_there_was_a_knob(tmp_path: Path) -> None:
    assert compose([])["runtime"]["native_layers"] is True
    rows = rows_of(tmp_path, record(0, runtime__native_layers=None), record(1))
    assert sorted("config.runtime.native_layers" in row for row in rows) == [False, True]


@pytest.mark.parametrize("group", ["cache", "decoding"])
def test_nothing_is_added_where_there_is_no_such_group(tmp_path: Path, group: str) -> None:
    bare = record(0)
    del bare.config[group]
    rows = rows_of(tmp_path, bare, record(1))
    assert sum(any(name.startswith(f"config.{group}.") for name in row) for row in rows) == 1
