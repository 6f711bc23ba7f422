"""A sweep's records in one file, read wherever its folder could be."""

from __future__ import annotations

import io
import lzma
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from minivllm.bench.records import archive
from minivllm.bench.records.identity import cell_id
from minivllm.bench.records.reading import (
    load_records,
    read_record,
    read_records,
    record_files,
    scan,
)
from minivllm.bench.records.storage import RECORD
from minivllm.bench.records.tables import damaged_tables, read_table
from minivllm.config.compose import compose
from minivllm.errors import BadInput
from minivllm.tasks import compare, report
from tests.damage import damaged
from tests.report.synthetic import make_record, make_sweep, write


def packed(target: Path, folder: Path, inside: str = "") -> Path:
    """A folder as `tar -cJf` packs it, the folders in it and leading dots too."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        tar.add(folder, arcname=inside or ".")
    target.write_bytes(lzma.compress(raw.getvalue()))
    return target


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder of runs, of which `fresh` is a folder and `kept` an archive with the same
    records."""
    place = write(tmp_path / "runs", make_sweep(blocks=2))
    place.rename(place.with_name("fresh"))
    packed(tmp_path / "runs" / "kept.tar.xz", tmp_path / "runs" / "fresh")
    return tmp_path / "runs"


def test_an_archive_is_read_as_its_folder(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, kept = read_records(runs / "fresh"), read_records(runs / "kept.tar.xz")
    assert len(kept) == 12 and {r["directory"] for r in kept} == {
        str(runs / "kept.tar.xz" / Path(r["directory"]).name) for r in folder
    }
    for one, other in zip(folder, kept, strict=True):
        assert {**one, "directory": ""} == {**other, "directory": ""}
    assert len(read_records(runs)) == len(load_records(runs / "*")) == 24
    (single,) = read_records(kept[0]["directory"])
    assert (
        single == kept[0]
        and read_record(Path(single["directory"]) / RECORD)["run_id"] == single["run_id"]
    )
    monkeypatch.chdir(runs)
    assert len(record_files("kept.tar.xz")) == len(
        record_files(["kept.tar.xz", "*.xz", "./kept.tar.xz"])
    )
    with pytest.raises(BadInput, match=r"no such file or folder: kept\.tar\.xz/none"):
        record_files("kept.tar.xz/none")


def test_folders_that_are_hidden_or_named_as_an_archive(runs: Path) -> None:
    fresh = runs / "fresh"
    first, second = sorted(fresh.iterdir())[:2]
    first.rename(fresh / f".replaced-{first.name}")
    second.rename(fresh / "odd.tar.xz")
    target = packed(runs / "again.tar.xz", fresh)
    assert len(read_records(fresh)) == 11
    assert len(read_records(target)) == 11
    assert len(read_table(fresh / "odd.tar.xz", "steps.parquet", None)) > 0


def test_its_tables_are_those_of_the_records(runs: Path) -> None:
    (record,) = read_records(record_files(runs / "kept.tar.xz")[0])
    directory = Path(record["directory"])
    digest = record["digests"]["steps.parquet"]
    one = read_table(directory, "steps.parquet", digest, ["start_s", "none"])
    assert one.column_names == ["start_s"]
    assert one.equals(
        read_table(runs / "fresh" / directory.name, "steps.parquet", digest, ["start_s"])
    )
    with pytest.raises(BadInput, match="is missing"):
        read_table(directory, "requests.parquet", None)
    with pytest.raises(BadInput, match="its digest is another"):
        read_table(directory, "steps.parquet", "0" * 64)
    row = {"status": "ok", "directory": str(directory), "digests.steps.parquet": "0" * 64}
    assert [Path(table).name for table in damaged_tables(row)] == [
        "requests.parquet",
        "steps.parquet",
    ]
    row["slimmed"] = ["requests.parquet", "steps.parquet"]
    assert [table.reason for table in damaged_tables(row)] == [
        "is not the table that was recorded: its digest is another"
    ]


def test_the_file_that_has_the_content(runs: Path) -> None:
    path = record_files(runs / "kept.tar.xz")[0]
    assert archive.holder(path) == runs / "kept.tar.xz"
    assert archive.holder(path.with_name("run.log")) is None
    assert archive.holder(runs / "fresh" / path.parent.name / RECORD) is not None
    assert archive.holder(runs / "fresh") is None
    assert archive.exists(path.parent) and not archive.exists(path.parent / "x")
    assert (
        archive.split(f"{runs}/kept.tar.xz.old") is None
        and archive.split(runs / "kept.tar.xzz") is None
    )
    with pytest.raises(BadInput, match="no such file in the archive"):
        archive.open_file(path.with_name("run.log"), "run.log")
    with pytest.raises(BadInput, match="larger than 4 bytes"):
        archive.read_bytes(path, 4, "record.json")


def test_one_that_changed_is_read_anew(runs: Path) -> None:
    target = runs / "kept.tar.xz"
    assert len(read_records(target)) == 12
    one = write(runs / "other", [make_record("nf4")])
    packed(target, one)
    os.utime(target, ns=(1, 1))
    assert len(read_records(target)) == 1


def test_one_that_is_damaged_is_one_of_many(runs: Path) -> None:
    (runs / "torn.tar.xz").write_bytes((runs / "kept.tar.xz").read_bytes()[:-40])
    with pytest.warns(UserWarning, match="1 unreadable"):
        found, damaged = scan(runs)
    assert len(found) == 24 and [str(path) for path in damaged] == [str(runs / "torn.tar.xz")]
    assert "cut off" in damaged[0].reason and "\n" not in damaged[0].reason
    with pytest.raises(BadInput, match=r"torn\.tar\.xz.*can be read, of 1.*cut off"):
        report.run(settings(runs, "torn.tar.xz"))


def settings(folder: Path, *runs: str) -> dict[str, Any]:
    return {
        "runs": [*runs],
        "runs_dir": str(folder),
        "reports_dir": str(folder.parent / "reports"),
        "name": None,
    }


def test_reports_and_comparisons_take_it(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("minivllm.report.page.figures", lambda cells: [])  # most of the time
    for name in ("fresh", "kept.tar.xz"):
        assert report.run(settings(runs, name)) == 0
    pages = runs.parent / "reports"
    assert (pages / "kept" / "table.csv").read_text() == (pages / "fresh" / "table.csv").read_text()
    page = (pages / "kept" / "index.html").read_text()
    assert 'href="../../runs/kept.tar.xz"' in page and "run.log" not in page
    given = compose(["task=compare", "runs=[fresh,kept.tar.xz]"])
    assert compare.run(given | settings(runs, "fresh", "kept.tar.xz")) in (0, 3)
    assert "only in" not in capsys.readouterr().out and (pages / "kept-against-fresh").is_dir()


def test_a_simulation_is_told_apart_by_the_steps_in_it(tmp_path: Path) -> None:
    def identity(place: Path) -> str:
        return cell_id(compose(["engine=simulated", f"engine.steps={place}"]), "f")

    folder = write(tmp_path / "runs", [make_record("nf4")])
    target = packed(tmp_path / "fit.tar.xz", folder)
    assert identity(folder) == identity(target) != identity(tmp_path / "none")


def tarred(*members: tarfile.TarInfo | tuple[str, bytes]) -> bytes:
    """A tar archive of members without content, and of files."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for member in members:
            if isinstance(member, tuple):
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                tar.addfile(info, io.BytesIO(member[1]))
            else:
                tar.addfile(member)
    return raw.getvalue()


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def test_the_files_of_an_archive(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.xz"
    path.write_bytes(
        lzma.compress(tarred(special("cell", tarfile.DIRTYPE), ("cell/a", b"1"), ("./cell/b", b"")))
    )
    assert archive.read_archive(path, "a") == {"cell/a": b"1", "cell/b": b""}


A = ("cell/a", b"12345")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is cut off"),
        (b"no xz at all", "is no archive that xz has packed, or damaged"),
        (lzma.compress(tarred(A))[:-30], "is cut off"),
        (lzma.compress(tarred(A)) + b"more", "goes on after its end"),
        (lzma.compress(b"no tar" * 200), "is no tar archive, or damaged"),
        (lzma.compress(tarred(A)[:514]), "is no tar archive, or damaged"),
        (lzma.compress(tarred(A, A)), "cell/a is in the archive twice"),
        (lzma.compress(tarred(A, ("./cell//a", b""))), "is in the archive twice"),
        (lzma.compress(tarred(("/etc/passwd", b""))), "/etc/passwd lies outside the archive"),
        (lzma.compress(tarred(("cell/../../x", b""))), "lies outside the archive"),
        (lzma.compress(tarred(special("..", tarfile.DIRTYPE))), "lies outside the archive"),
        (lzma.compress(tarred(special("l", tarfile.SYMTYPE, "/etc"))), "l is a link or a device"),
        (
            lzma.compress(tarred(A, special("l", tarfile.LNKTYPE, "cell/a"))),
            "l is a link or a device",
        ),
        (lzma.compress(tarred(special("p", tarfile.FIFOTYPE))), "p is a link or a device"),
        (lzma.compress(tarred(special("s", tarfile.GNUTYPE_SPARSE))), "s is a link or a device"),
    ],
)
def test_an_archive_that_cannot_be_taken_is_one_line(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "a.tar.xz"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=message) as error:
        archive.read_archive(path, "a.tar.xz")
    assert "\n" not in str(error.value) and str(error.value).startswith("a.tar.xz")


def test_an_archive_is_bounded_in_size_files_and_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.tar.xz"
    path.write_bytes(lzma.compress(tarred(("zeros", bytes(3 << 20)))))  # some hundred bytes
    monkeypatch.setattr(archive, "MAX_ARCHIVE", 2 << 20)
    with pytest.raises(BadInput, match="holds more than 2 MiB"):
        archive.read_archive(path, "a")
    monkeypatch.setattr(archive, "UNPACKING_MEMORY", 1 << 20)
    with pytest.raises(BadInput, match="Memory usage limit"):
        archive.read_archive(path, "a")
    monkeypatch.undo()
    path.write_bytes(lzma.compress(tarred(*((str(number), b"") for number in range(4)))))
    monkeypatch.setattr(archive, "MAX_ARCHIVE_FILES", 3)
    with pytest.raises(BadInput, match="holds more than 3 files"):
        archive.read_archive(path, "a")


@pytest.mark.fuzz("records")
@given(damaged(tarred(A, ("cell/long" * 40, b"x" * 600), special("cell", tarfile.DIRTYPE))))
def test_a_damaged_archive_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, tar: bytes
) -> None:
    path = tmp_path_factory.mktemp("archive") / "a.tar.xz"
    path.write_bytes(lzma.compress(tar, preset=0))
    try:
        found = archive.read_archive(path, "a")
    except BadInput as error:
        assert "\n" not in str(error)
    else:
        assert all(isinstance(content, bytes) for content in found.values())
