"""What a cell is called by: knobs that change what is measured, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minivllm.analysis.cells import gather
from minivllm.analysis.rows import read_rows
from minivllm.config.groups import SECTIONS
from tests.report.synthetic import make_record, write


def varying(root: Path, section: str, first: Any, second: Any) -> list[str]:
    """Titles by which two records of different cells are told apart."""
    records = []
    for name, value in (("first", first), ("second", second)):
        record = make_record(cell_id=name, run_id=name)
        record.config[section] = {"setting": value}
        records.append(record)
    rows, _ = read_rows(write(root, records, parquet=False))
    return list(gather(rows)[0].varying)


@pytest.mark.parametrize("section", [name for name in SECTIONS if name != "quality"])
def test_how_results_are_shown_is_no_name_of_a_cell(tmp_path: Path, section: str) -> None:
    assert varying(tmp_path, section, 1, 2) == []
    assert varying(tmp_path / "engine", "cache", 1, 2) != []


def test_a_label_leaves_out_what_follows_from_other_columns(tmp_path: Path) -> None:
    records = []
    for name, size, other in (("first", 1, 0), ("second", 2, 0), ("third", 2, 5)):
        record = make_record(cell_id=name, run_id=name, arm=f"{name}=${{long}}")
        record.config["cache"] = {**dict.fromkeys("abcde", size), "f": other}
        records.append(record)
    rows, _ = read_rows(write(tmp_path, records, parquet=False))
    assert [cell.label for cell in gather(rows)] == ["a=1 · f=0", "a=2 · f=0", "a=2 · f=5"]


def test_a_label_names_the_engine_although_other_columns_tell_it(tmp_path: Path) -> None:
    """What one engine has and another lacks does not say which the other is."""
    records = []
    for name, reuse in (("minivllm", 0), ("minivllm", 1), ("transformers", 0), ("transformers", 1)):
        record = make_record(cell_id=f"{name}{reuse}", run_id=f"{name}{reuse}")
        record.config["choices"] = {**record.config["choices"], "engine": name}
        own = {knob: reuse for knob in "abc"} if name == "minivllm" else {}
        record.config["cache"] = own
        record.config["workload"] = {"reuse": reuse, "x": reuse}
        records.append(record)
    rows, _ = read_rows(write(tmp_path, records, parquet=False))
    labels = [cell.label for cell in gather(rows)]
    assert all(label.startswith(("minivllm", "transformers")) for label in labels), labels
    assert len({*labels}) == 4
