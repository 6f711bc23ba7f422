"""Reading records back."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from minivllm import redaction
from minivllm.bench.records import reading as records_module
from minivllm.bench.records import storage
from minivllm.bench.records.archive import record_files
from minivllm.bench.records.reading import (
    flat_rows_of,
    flatten,
    load_records,
    read_records,
    scan,
)
from minivllm.bench.records.record import Failure, Record
from minivllm.bench.records.tables import read_table
from minivllm.errors import BadInput


def put(directory: Path, run_id: str, status: str = "ok", tokens: float | None = 10.0) -> Path:
    config = {"batching": {"max_num_seqs": 4}, "choices": {"quant": "nf4"}}
    record = Record(run_id, "cell", directory.parent.name, "arm", 0, status, config)
    record.metrics.ttft_ms.p50 = 12.5
    record.metrics.output_tokens_per_s = tokens
    record.validity.reasons = ["because"]
    if status != "ok":
        record.error = Failure("RuntimeError", "broke", "tail")
    directory.mkdir(parents=True)
    storage.write_record(directory, record)
    return directory


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    put(tmp_path / "runs" / "s1" / "a-1", "1")
    put(tmp_path / "runs" / "s1" / "b-2", "2", "crashed", None)
    put(tmp_path / "runs" / "s2" / "c-3", "3")
    return tmp_path / "runs"


def test_columns_are_flat(runs: Path) -> None:
    frame = load_records(runs)
    assert sorted(frame["run_id"]) == ["1", "2", "3"]
    row = frame[frame.run_id == "2"].iloc[0]
    assert row["metrics.ttft_ms.p50"] == 12.5
    assert row["choices.quant"] == "nf4"
    assert row["config.batching.max_num_seqs"] == 4
    assert row["status"] == "crashed" and row["error.type"] == "RuntimeError"
    assert row["validity.reasons"] == ["because"]
    assert row["directory"] == str(runs / "s1" / "b-2")
    assert frame.attrs["unreadable"] == []


def test_groups_and_varied_knobs_have_the_names_of_a_reports_table(runs: Path) -> None:
    frame = load_records(runs)
    assert set(frame.groupby("quant").groups) == {"nf4"}
    assert "batching.max_num_seqs" not in frame  # it is the same everywhere
    path = runs / "s1" / "a-1" / "record.json"
    record = json.loads(path.read_text())
    record["config"]["batching"]["max_num_seqs"] = 8
    path.write_text(json.dumps(record))
    assert sorted(load_records(runs)["batching.max_num_seqs"]) == [4, 4, 8]


def test_columns_without_a_value_are_left_out_on_request(runs: Path) -> None:
    whole, dense = load_records(runs), load_records(runs, empty_columns=False)
    assert not dense.isna().all().any() and set(dense) < set(whole)
    assert dense.attrs["unreadable"] == []
    assert len(load_records([], empty_columns=False)) == 0


def test_any_level_list_and_glob(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ids(paths: object) -> list[str]:
        return sorted(record["run_id"] for record in read_records(paths))  # type: ignore[arg-type]

    assert ids(runs / "s1" / "a-1") == ["1"]
    assert ids(runs / "s1" / "a-1" / "record.json") == ["1"]
    assert ids(runs / "s1") == ["1", "2"]
    assert ids(str(runs)) == ["1", "2", "3"]
    assert ids(str(runs / "s*")) == ["1", "2", "3"]
    assert ids([runs / "s1", runs / "s1" / "a-1", runs / "s2"]) == ["1", "2", "3"]
    monkeypatch.setenv("HOME", str(runs.parent))
    assert ids("~/runs/s1") == ids("~/runs/s[1]") == ["1", "2"]


def test_torn_records_are_left_out_and_named(runs: Path) -> None:
    text = (runs / "s1" / "a-1" / "record.json").read_text()
    words = json.dumps({**json.loads(text), "metrics": {"ttft_ms": "abc"}})
    for name, content in (
        ("torn", text[: len(text) // 2]),
        ("list", "[]"),
        ("other", '{"run_id": "x"}'),
        ("words", words),
    ):
        (runs / "s1" / name).mkdir()
        (runs / "s1" / name / "record.json").write_text(content)
    (runs / "s1" / "unfinished").mkdir()
    with pytest.warns(UserWarning, match="4 unreadable"):
        records, unreadable = scan(runs)
    assert len(records) == 3
    assert sorted(Path(path).parent.name for path in unreadable) == [
        "list",
        "other",
        "torn",
        "words",
    ]
    with pytest.warns(UserWarning, match="unreadable"):
        assert len(load_records(runs).attrs["unreadable"]) == 4


def test_a_wrong_place_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such file or folder"):
        load_records(tmp_path / "nowhere")
    assert len(load_records(tmp_path)) == 0


def test_records_of_other_versions_are_migrated_or_left_out_with_the_reason(runs: Path) -> None:
    path = runs / "s1" / "a-1" / "record.json"
    record = json.loads(path.read_text())
    assert record["schema_version"] == 2 and record["digests"] == {}
    for version, readable in ((1, True), (9, False), ("one", False)):
        path.write_text(json.dumps({**record, "schema_version": version}))
        with warnings.catch_warnings(record=True):
            records, unreadable = scan(runs)
        assert len(records) == 2 + readable
        assert {found["schema_version"] for found in records} == {2}
        if not readable:
            assert unreadable == [str(path)] and "1 and 2 are read here" in unreadable[0].reason


def test_a_deep_record_is_one_of_many(runs: Path) -> None:
    (runs / "s1" / "a-1" / "record.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    with pytest.warns(UserWarning, match="nested too deeply"):
        records, unreadable = scan(runs)
    assert (len(records), len(unreadable)) == (2, 1)


def test_a_pipe_in_place_of_a_record_is_not_waited_for(runs: Path) -> None:
    path = runs / "s1" / "a-1" / "record.json"
    path.unlink()
    os.mkfifo(path)
    with pytest.warns(UserWarning, match="a pipe or a device"):
        assert len(scan(runs)[0]) == 2


def test_a_table_that_was_swapped_is_found(tmp_path: Path) -> None:
    places = []
    for name in ("a", "b"):
        place = put(tmp_path / "runs" / "s" / name, name)
        storage.write_record(
            place,
            Record(name, "cell", "s", "arm", 0, "ok", {}),
            [{"request_id": name}],
            [{"start_s": 1.0}],
        )
        places.append(place)
    assert load_records(tmp_path / "runs").attrs["damaged"] == []
    shutil.copy(places[0] / "requests.parquet", places[1] / "requests.parquet")
    steps = places[0] / "steps.parquet"
    content = bytearray(steps.read_bytes())
    content[len(content) // 2] ^= 1
    steps.write_bytes(content)
    with pytest.warns(UserWarning, match="2 table"):
        damaged = load_records(tmp_path / "runs").attrs["damaged"]
    assert damaged == [str(steps), str(places[1] / "requests.parquet")]
    digests = storage.digests(places[0])
    assert read_table(places[0], "requests.parquet", digests["requests.parquet"]).num_rows == 1
    for place, name in ((places[0], "steps.parquet"), (places[1], "requests.parquet")):
        digest = json.loads((place / "record.json").read_text())["digests"][name]
        with pytest.raises(BadInput, match="not the table that was recorded"):
            read_table(place, name, digest)
    with pytest.raises(BadInput, match="missing"):
        read_table(places[0], "telemetry.parquet", None)


@pytest.mark.parametrize(
    ("columns", "needed", "message"),
    [
        ({"num_requests": ["x"]}, [], "holds string in the column num_requests"),
        ({"token_times_s": [1.0]}, [], "holds double in the column token_times_s"),
        ({"token_times_s": [["x"]]}, [], "holds list<.*string> in the column token_times_s"),
        ({"phase": [1]}, [], "holds int64 in the column phase"),
        ({"num_requests": [1, None]}, ["num_requests"], "has rows without num_requests"),
        ({"num_requests": [1.0, float("nan")]}, ["num_requests"], "has rows without num_requests"),
        ({"phase": ["x"]}, ["num_requests"], "has rows without num_requests"),
    ],
)
def test_a_table_whose_columns_are_others_is_not_the_one(
    tmp_path: Path, columns: dict[str, Any], needed: list[str], message: str
) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "steps.parquet")
    with pytest.raises(BadInput, match=message):
        read_table(tmp_path, "steps.parquet", None, [*columns, *needed], needed)


def test_a_table_may_have_what_a_plug_in_adds_and_no_rows(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table(
        {"mood": pyarrow.array([], "string"), "num_requests": pyarrow.array([], "int64")}
    )
    pyarrow.parquet.write_table(table, tmp_path / "steps.parquet")
    read = read_table(tmp_path, "steps.parquet", None, ["num_requests"], ["num_requests"])
    assert read.num_rows == 0 and read.column_names == ["num_requests"]
    assert read_table(tmp_path, "steps.parquet", None).column_names == ["mood", "num_requests"]


SECRETS = ("sk_live_51Hq9", "hunter2hunter2")


def test_secrets_that_an_older_version_stored_are_not_read(runs: Path) -> None:
    key, password = SECRETS
    path = runs / "s1" / "b-2" / "record.json"
    record = json.loads(path.read_text())
    record["config"]["engine"] = {
        "url": f"https://user:{password}@host/v1",
        "extra": {"api_key": key, "top_k": 3},
        "as_written": "no list",
    }
    record["config"]["as_written"] = "no list"
    record["provenance"] = {
        "command": f"run.py engine.extra.api_key={key}",
        "host": "h",
        "cpu": {"model": key},
    }
    record["error"] |= {
        "message": f"the server refused {key}",
        "log_tail": f"GET https://u:{password}@host",
    }
    path.write_text(json.dumps({**record, "schema_version": 1}))
    (read,), (row,) = read_records(path), flat_rows_of([path])[0]
    assert not any(secret in text for secret in SECRETS for text in (json.dumps(read), str(row)))
    assert read["config"]["engine"]["extra"] == {"api_key": "***", "top_k": 3}
    assert (
        row["config.engine.extra.top_k"] == 3 and row["error.message"] == "the server refused ***"
    )
    assert flatten(read) | {"config.as_written": 0} == row | {"config.as_written": 0}


def test_what_many_records_share_is_worked_on_once(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for block in range(20):
        place = put(runs / "many" / str(block), str(block))
        path = place / "record.json"
        record = json.loads(path.read_text())
        record["config"]["batching"]["max_num_seqs"] = 7 + block % 2
        record["config"]["cache"] = {"block_size": 3}
        path.write_text(json.dumps(record))
    read: list[Path] = []
    read_json = records_module.read_json
    masked: list[dict[str, object]] = []
    monkeypatch.setattr(
        records_module,
        "read_json",
        lambda path: (read.append(path), read_json(path))[1],
    )
    shown = redaction.shown
    monkeypatch.setattr(redaction, "shown", lambda part: (masked.append(part), shown(part))[1])
    records_module._part.cache_clear()
    rows, damaged = flat_rows_of(record_files(runs / "many"))
    assert not damaged and len(read) == len(set(read)) == len(rows) == 20
    assert {row["config.batching.max_num_seqs"] for row in rows} == {7, 8}
    assert masked == [
        {"batching": {"max_num_seqs": 7}},
        {"choices": {"quant": "nf4"}},
        {"cache": {"block_size": 3}},
        {"batching": {"max_num_seqs": 8}},
    ]
    rows[0]["config.batching.max_num_seqs"] = 0
    (again,), _ = flat_rows_of(record_files(runs / "many" / "0"))
    assert again["config.batching.max_num_seqs"] == 7


def test_a_number_of_another_type_is_another_part(runs: Path) -> None:
    for block, value in enumerate((1, 1.0, True)):
        path = put(runs / "types" / str(block), str(block)) / "record.json"
        record = json.loads(path.read_text())
        path.write_text(json.dumps({**record, "config": {"cache": {"on": value}}}))
    rows, _ = flat_rows_of(record_files(runs / "types"))
    assert [type(row["config.cache.on"]) for row in rows] == [int, float, bool]
