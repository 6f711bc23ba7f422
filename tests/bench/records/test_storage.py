"""Files are whole or absent."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pandas
import pytest
import yaml

from minivllm.bench.completion import complete
from minivllm.bench.records import storage
from minivllm.bench.records.measurement import Measurement
from minivllm.bench.records.record import Record
from minivllm.config.compose import compose
from minivllm.platform import files


def make_record(**fields: Any) -> Record:
    return Record(
        **{
            "run_id": "r",
            "cell_id": "c",
            "sweep": "s",
            "arm": "a",
            "block": 0,
            "status": "ok",
            "config": {},
            **fields,
        }
    )


@pytest.mark.parametrize(
    ("place", "kept"),
    [
        ("/home/somebody/models/Qwen3-0.6B", "Qwen3-0.6B"),
        ("~/models/mine/", "mine"),
        ("models/mine", "models/mine"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("embedded", "embedded"),
    ],
)
def test_no_record_says_where_on_a_machine_a_model_lies(
    tmp_path: Path, place: str, kept: str
) -> None:
    config = {
        "model": {"path": place, "weights": place, "max_model_len": None},
        "quant": {"dtype": "bfloat16"},
    }
    expected = {**config, "model": {"path": kept, "weights": kept, "max_model_len": None}}
    storage.prepare(tmp_path / "run", config)
    storage.write_record(tmp_path / "run", make_record(config=config))
    assert json.loads((tmp_path / "run" / storage.RECORD).read_text())["config"] == expected
    assert yaml.safe_load((tmp_path / "run" / storage.CONFIG).read_text()) == expected
    assert config["model"]["path"] == place  # the configuration itself can still be run


@pytest.mark.parametrize("durable", [True, False])
def test_a_file_is_on_the_disk_before_its_name_is_and_then_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    path = tmp_path / "file.json"
    done: list[tuple[str, bool]] = []

    def sync(descriptor: int) -> None:
        synced = Path(f"/proc/self/fd/{descriptor}").resolve()
        done.append(("folder" if synced == tmp_path.resolve() else synced.name, path.exists()))

    monkeypatch.setattr(os, "fsync", sync)
    files.write_bytes(path, b"{}", durable)
    assert path.read_text() == "{}"
    if not durable:
        assert done == []
        return
    (name, named), after = done
    assert name.startswith(".file.json.") and not named
    assert after == ("folder", True)


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.json"
    files.write_json(path, {"a": 1})

    def full(path: Path, content: bytes) -> None:
        path.write_bytes(content[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "_write", full)
    with pytest.raises(OSError, match="No space"):
        files.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["file.json"]


def test_json_has_no_nan(tmp_path: Path) -> None:
    files.write_json(tmp_path / "x", {"a": float("nan"), "b": [float("inf"), 1.5], "c": Path("p")})
    assert json.loads((tmp_path / "x").read_text()) == {"a": None, "b": [None, 1.5], "c": "p"}


def test_files_can_be_read_by_others(tmp_path: Path) -> None:
    files.write_text(tmp_path / "x", "y")
    assert (tmp_path / "x").stat().st_mode & 0o044 == 0o044


def test_parquet_fills_gaps_with_null(tmp_path: Path) -> None:
    files.write_parquet(tmp_path / "t", [{"a": 1}, {"a": 2, "b": [1.0, 2.0]}])
    frame = pandas.read_parquet(tmp_path / "t")
    assert list(frame.a) == [1, 2]
    assert frame.b[0] is None and list(frame.b[1]) == [1.0, 2.0]


def test_record_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    atomically = files.atomically

    def spy(path: Path, *rest: Any) -> None:
        order.append(path.name)
        atomically(path, *rest)

    monkeypatch.setattr(files, "atomically", spy)
    (tmp_path / storage.HANDOVER).write_text("{}")
    storage.write_record(
        tmp_path, make_record(), [{"a": 1}], [{"b": 1}], [{"t_s": 0.0}], {"model": {}}
    )
    assert sorted(order) == [
        "config.yaml",
        "record.json",
        "requests.parquet",
        "steps.parquet",
        "telemetry.parquet",
    ]
    assert order[-1] == "record.json"
    assert not (tmp_path / storage.HANDOVER).exists()


def test_no_record_if_a_table_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, rows: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage, "write_parquet", full)
    with pytest.raises(OSError, match="No space"):
        storage.write_record(tmp_path, make_record(), telemetry=[{"t_s": 0.0}])
    assert not (tmp_path / storage.RECORD).exists()


def test_prepare_empties_a_directory(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b"
    storage.prepare(directory, {"x": 1})
    (directory / storage.RECORD).write_text("{}")
    (directory / "requests.parquet").write_text("old")
    storage.prepare(directory, {"x": [1, "ü"]})
    assert [path.name for path in directory.iterdir()] == [storage.CONFIG]
    assert (directory / storage.CONFIG).read_text() == "x:\n- 1\n- ü\n"


ODD = {
    **{"long": "word " * 60, "lines": "one\ntwo \n", "blank": " x ", "mark": "- a: b # c", "e": ""},
    **{"quotes": "'a' \"b\"", "control": "\x07\t\x85\u2028", "wide": "é" * 90, "null": "null"},
    **{"date": "2026-01-01", "number": "1_000", "small": 1e-7, "none": None, "yes": [True, "yes"]},
    "deep": [{"a": [1, [2, {"b": []}]]}, {}],
}


def test_a_configuration_is_the_same_with_and_without_libyaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in (ODD, compose(), compose(["preset=serve", "quant=nf4"])):
        files.write_yaml(tmp_path / "with", value)
        with monkeypatch.context() as patch:
            patch.delattr(yaml, "CSafeDumper", raising=False)
            files.write_yaml(tmp_path / "without", value)
        assert (tmp_path / "with").read_text() == (tmp_path / "without").read_text()
        assert yaml.safe_load((tmp_path / "with").read_text()) == value
    files.write_yaml(tmp_path / "with", ["😀"])  # which libyaml writes as a number
    assert yaml.safe_load((tmp_path / "with").read_text()) == ["😀"]


def test_a_configuration_holds_paths_that_are_no_utf_8(tmp_path: Path) -> None:
    value = {"reports_dir": os.fsdecode(b"/tmp/r\xffx"), "name": "ü"}
    files.write_yaml(tmp_path / "x", value)
    assert yaml.safe_load((tmp_path / "x").read_text()) == value


def test_log_tail(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert files.log_tail(path) == ""
    path.write_bytes(b"\xff\n" + b"".join(b"line %d\n" % i for i in range(10_000)))
    tail = files.log_tail(path, lines=3)
    assert tail == "line 9997\nline 9998\nline 9999"
    assert len(files.log_tail(path, lines=10**6, limit=100)) == 100


def test_a_finished_record_stays_until_it_is_replaced(tmp_path: Path) -> None:
    directory = tmp_path / "cell-1"
    directory.mkdir()
    (directory / storage.RECORD).write_text("old")
    storage.prepare(directory, {"a": 1})
    assert not (directory / storage.RECORD).exists()
    assert (storage.standing(directory) / storage.RECORD).read_text() == "old"
    storage.recover(directory)  # the new measurement did not end
    assert (directory / storage.RECORD).read_text() == "old"
    storage.prepare(directory, {"a": 1})
    (directory / storage.RECORD).write_text("new")
    assert storage.standing(directory) == directory
    storage.recover(directory)
    assert (directory / storage.RECORD).read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["cell-1"]


def test_what_a_worker_handed_over_replaces_the_record_that_was_put_aside(tmp_path: Path) -> None:
    directory = tmp_path / "cell-1"
    measurement = Measurement("r", "c", "s", "a", 0, str(directory), {"measure": {}})
    for _ in range(2):
        storage.prepare(directory, {})
        files.write_json(directory / storage.HANDOVER, measurement.record("ok").to_dict())
        assert complete(measurement, {}, [], None) == ("ok", "")
    assert [path.name for path in tmp_path.iterdir()] == ["cell-1"]
    (directory / storage.HANDOVER).write_text("{}")  # the supervisor was killed at this moment
    storage.recover(directory)
    assert not (directory / storage.HANDOVER).exists() and (directory / storage.RECORD).exists()
    storage.remove(directory)
    storage.recover(directory)
    # a record that somebody deletes does not come back as an older one
    assert not directory.exists()
