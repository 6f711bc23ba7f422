"""Records that several processes read are those that one process reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minivllm import redaction
from minivllm.analysis import rows as rows_module
from minivllm.analysis.rows import read_rows
from minivllm.bench.records.reading import _part
from minivllm.platform.processes import process_pool
from minivllm.platform.processes.process_pool import ProcessPool
from tests.bench.records.test_reading import put


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "MANY", 6)
    monkeypatch.setattr(rows_module, "CHUNK", 2)
    monkeypatch.setattr(process_pool, "usable_cores", lambda: 2)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for index in range(12):
        put(tmp_path / "runs" / "s" / str(index), str(index))
    return tmp_path / "runs"


def test_rows_and_damaged_files_are_the_same(runs: Path) -> None:
    (runs / "s" / "7" / "record.json").write_text("{")
    path = runs / "s" / "5" / "record.json"
    path.write_text(path.read_text().replace('"because"', '"be\\u0007cause"'))
    alone = read_rows(runs)
    with ProcessPool() as pool:
        assert read_rows(runs, pool) == alone and pool._processes
    assert len(alone[0]) == 11
    assert all("".join(row["validity.reasons"]).isprintable() for row in alone[0])
    (damaged,) = alone[1]
    assert damaged == str(runs / "s" / "7" / "record.json") and "JSON" in damaged.reason


def test_names_of_columns_are_the_same_objects(runs: Path) -> None:
    with ProcessPool() as pool:
        rows, _ = read_rows(runs, pool)
    assert len({id(name) for row in rows for name in row if name.startswith("metrics.")}) == len(
        {name for row in rows for name in row if name.startswith("metrics.")}
    )


def test_few_records_are_read_by_one_process(runs: Path) -> None:
    with ProcessPool() as pool:
        places = [runs / "s" / "2", runs / "s" / "1", runs / "s" / "2"]
        rows, _ = read_rows(places, pool)
        assert [row["run_id"] for row in rows] == ["2", "1"] and not pool._processes


def test_a_secret_of_one_record_is_hidden_in_those_of_another_process(runs: Path) -> None:
    _part.cache_clear()
    redaction.forget()
    secret = "s3cr3tw0rd99"
    old = runs / "s" / "0" / "record.json"
    record = json.loads(old.read_text())
    record["config"]["engine"] = {"api_key": secret}
    old.write_text(json.dumps(record))
    late = runs / "s" / "9" / "record.json"
    record = json.loads(late.read_text())
    record["error"] = {"type": "E", "message": f"key {secret} was wrong", "log_tail": ""}
    late.write_text(json.dumps(record))
    try:
        with ProcessPool() as pool:
            rows, _ = read_rows(runs, pool)
        assert secret not in str(rows)
    finally:
        redaction.forget()
