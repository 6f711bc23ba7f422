"""scripts/archive_records.py: what it leaves out, and that the rest is as it was recorded."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from minivllm.bench.records.events import has_events, read_events, write_events
from minivllm.bench.records.reading import load_records, read_records
from minivllm.bench.records.storage import EVENTS, STEPS, TELEMETRY, finish
from minivllm.bench.records.tables import read_table
from minivllm.errors import BadInput
from minivllm.report.inputs import read
from tests.report.synthetic import make_record, make_sweep, write
from tests.scripts.load import load_script

script = load_script("archive_records")


def run(monkeypatch: pytest.MonkeyPatch, *words: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", ["archive_records.py", *map(str, words)])
    script.main()


def test_records_and_tables_are_those_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "runs", make_sweep(blocks=2))
    target = folder.with_name(f"{folder.name}.tar.xz")
    run(monkeypatch, folder)
    assert f"{target}: 12 records, {target.stat().st_size:,} bytes" in capsys.readouterr().out
    before = {record["run_id"]: record for record in read_records(folder)}
    own = {"directory", "digests", "slimmed"}
    for record in read_records(target):
        recorded = before[record["run_id"]]
        assert {k: v for k, v in record.items() if k not in own} == {
            k: v for k, v in recorded.items() if k not in own
        }
        there = set(recorded["digests"])
        first = record["block"] == 0
        assert set(record["digests"]) == (there if first else set())
        assert record["slimmed"] == (None if first or not there else sorted(there))
        for name, digest in record["digests"].items():
            table = read_table(Path(record["directory"]), name, digest)
            assert table.equals(
                read_table(Path(recorded["directory"]), name, recorded["digests"][name])
            )
    names = {Path(table).name for table in read(target).damaged}
    # of none that was left out
    assert names == {Path(table).name for table in read(folder).damaged}
    assert load_records(target)["run_id"].tolist() == load_records(folder)["run_id"].tolist()


def test_every_block_is_kept_where_asked_and_bytes_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "runs", make_sweep(blocks=2))
    run(monkeypatch, folder, "--all-steps", "--output", tmp_path / "all")
    whole = tmp_path / "all" / f"{folder.name}.tar.xz"
    ok = [record for record in read_records(whole) if record["status"] == "ok"]
    assert all(record["slimmed"] is None and len(record["digests"]) == 2 for record in ok)
    for source, place in ((folder, "a"), (whole, "b"), (tmp_path / "a" / whole.name, "c")):
        run(monkeypatch, source, "--output", tmp_path / place)
    contents = {(tmp_path / place / whole.name).read_bytes() for place in "abc"}
    assert len(contents) == 1


def test_tables_are_left_out_of_every_block_where_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "runs", make_sweep(blocks=2))
    run(monkeypatch, folder, "--without", "steps")
    target = folder.with_name(f"{folder.name}.tar.xz")
    there = {record["run_id"] for record in read_records(folder) if STEPS in record["digests"]}
    packed = read_records(target)
    assert there == {r["run_id"] for r in packed if STEPS in (r["slimmed"] or ())}
    assert {name for record in packed for name in record["digests"]} == {TELEMETRY}
    assert STEPS not in {Path(table).name for table in read(target).damaged}
    with pytest.raises(SystemExit):
        run(monkeypatch, folder, "--without", "records")


def test_events_of_first_blocks_are_kept_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [make_record(block=block, run_id=f"r{block}") for block in range(2)]
    folder = write(tmp_path / "runs", records)
    bundle = {"time_s": 0.0, "end_s": 0.0, "engine": {"version": 1}}
    for record in records:
        (directory,) = folder.glob(f"*-{record.run_id}")
        write_events(directory, [json.dumps(bundle).encode()])
        finish(directory, json.loads((directory / "record.json").read_text()))
    run(monkeypatch, folder)
    first, later = read_records(folder.with_name(f"{folder.name}.tar.xz"))
    assert read_events(Path(first["directory"]), first["digests"])[0] == bundle
    assert EVENTS in later["slimmed"] and not has_events(Path(later["directory"]))


def test_what_is_damaged_is_not_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "runs", [make_record("nf4"), make_record("int8")])
    next(folder.glob("nf4*/steps.parquet")).write_bytes(b"PAR1")
    with pytest.raises(BadInput, match="its digest is another"):
        run(monkeypatch, folder)
    next(folder.glob("nf4*/record.json")).write_text("{")
    with pytest.raises(BadInput, match="not valid JSON"):
        run(monkeypatch, folder)
    assert list(tmp_path.rglob("*.tar.xz")) == []
