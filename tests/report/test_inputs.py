"""Whatever one record or table has become, a report is made of the others, and names what is
damaged."""

from __future__ import annotations

import io
import json
import os
import shutil
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minivllm.bench.records.archive import read_archive
from minivllm.platform.processes.process_pool import ProcessPool
from minivllm.report.inputs import read
from minivllm.report.page import write_report
from minivllm.report.studies.listed import findings
from tests.damage import damaged
from tests.report.synthetic import make_record, make_sweep, write

RUNS = Path(__file__).parents[2] / "reports" / "examples" / "cpu" / "runs"
STUDIES = ["ablation", "native-tiny", "scaling", "tiny-precision", "tune"]
MOST = 8  # records of a study
PARQUET = ["requests.parquet", "steps.parquet", "telemetry.parquet"]


@cache
def files(study: str) -> list[tuple[str, dict[str, bytes]]]:
    """Records of a study, its first blocks: the name of each and its files."""
    every: dict[str, dict[str, bytes]] = {}
    for name, content in read_archive(RUNS / f"{study}.tar.xz", study).items():
        folder, _, file = name.partition("/")
        every.setdefault(folder, {})[file] = content
    blocks = {folder: json.loads(found["record.json"])["block"] for folder, found in every.items()}
    return sorted(every.items(), key=lambda item: (blocks[item[0]], item[0]))[:MOST]


@cache
def records(study: str, index: int) -> st.SearchStrategy[bytes]:
    return damaged(files(study)[index][1]["record.json"])


def as_parquet(table: pyarrow.Table) -> bytes:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(table, sink)
    return sink.getvalue()


@cache
def tables(study: str, index: int, name: str) -> st.SearchStrategy[bytes]:
    """A table that is cut or has other bytes; or a whole one in which columns are gone, or hold
    something else."""
    content = files(study)[index][1][name]
    whole = pyarrow.parquet.read_table(io.BytesIO(content))
    odd: dict[str, Any] = {
        "text": ["x"] * len(whole),
        "null": pyarrow.nulls(len(whole)),
        "nan": [float("nan")] * len(whole),
        "huge": [-(1 << 62)] * len(whole),
        "list": [[1.0]] * len(whole),
    }

    def other(kinds: dict[str, str]) -> bytes:
        columns = {
            column: whole[column] for column in whole.column_names if kinds.get(column) != "gone"
        }
        return as_parquet(
            pyarrow.table(columns | {c: odd[k] for c, k in kinds.items() if k != "gone"})
        )

    kinds = st.dictionaries(
        st.sampled_from(whole.column_names), st.sampled_from([*odd, "gone"]), max_size=4
    )
    return kinds.map(other) | st.just(as_parquet(whole.slice(0, 0))) | damaged(content)


def sweep(root: Path, study: str, data: st.DataObject, tables_too: bool) -> tuple[Path, int]:
    """A study in which one record, and with `tables_too` one of its tables, is damaged; and how
    many records it has."""
    place = root / "runs"
    shutil.rmtree(place, ignore_errors=True)
    index = data.draw(st.sampled_from([0, 5]))
    for number, (folder, found) in enumerate(files(study)):
        (place / folder).mkdir(parents=True)
        for name, content in found.items():
            if name == "record.json" or tables_too:
                (place / folder / name).write_bytes(content)
        if number == index:
            broken = place / folder
            if not tables_too or data.draw(st.booleans()):
                (broken / "record.json").write_bytes(data.draw(records(study, index)))
            if tables_too and (there := sorted({*found} & {*PARQUET})):
                name = data.draw(st.sampled_from(there))
                (broken / name).write_bytes(data.draw(tables(study, index, name)))
    return place, len(files(study))


@pytest.mark.fuzz("records")
@settings(
    max_examples=settings().max_examples // 5,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(study=st.sampled_from(STUDIES), data=st.data())
def test_a_damaged_record_is_one_of_many(tmp_path: Path, study: str, data: st.DataObject) -> None:
    place, total = sweep(tmp_path, study, data, False)
    material = read(place)
    assert len(material.rows) + len(material.unreadable) == total and len(material.unreadable) <= 1
    assert all("\n" not in path.reason for path in material.unreadable)
    assert sum(len(cell.rows) for cell in material.cells) == len(material.rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        findings(material)


def test_a_record_that_has_lost_its_block_takes_no_other_s_place(tmp_path: Path) -> None:
    place = write(tmp_path, [make_record("nf4", block=block) for block in (0, 1)])
    damaged_one = sorted(place.glob("*/record.json"))[1]
    damaged_one.write_text(damaged_one.read_text().replace('"block"', '"#block"'))
    material = read(place)
    assert len(material.rows) == 2 and sum(len(cell.rows) for cell in material.cells) == 2


@pytest.mark.fuzz("records")
@pytest.mark.usefixtures("without_figures")
@settings(
    max_examples=settings().max_examples // 25,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(study=st.sampled_from(STUDIES), data=st.data())
def test_a_page_is_made_of_what_is_whole(tmp_path: Path, study: str, data: st.DataObject) -> None:
    place, _ = sweep(tmp_path, study, data, True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert write_report(read(place), tmp_path / "page").is_file()


def test_a_pipe_in_place_of_a_table_is_not_waited_for(tmp_path: Path) -> None:
    place = write(tmp_path, [make_record("nf4")])
    table = next(place.glob("*/steps.parquet"))
    table.unlink()
    os.mkfifo(table)
    (found,) = (one for one in read(place).damaged if one == str(table))
    assert found.reason == "is a pipe or a device, not a regular file"


@pytest.mark.usefixtures("without_figures")
def test_each_record_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = write(tmp_path, make_sweep())
    opened: list[str] = []
    low, high = os.open, open
    monkeypatch.setattr(
        os, "open", lambda path, *args: (opened.append(str(path)), low(path, *args))[1]
    )
    monkeypatch.setattr(
        "builtins.open",
        lambda path, *args, **more: (opened.append(str(path)), high(path, *args, **more))[1],
    )
    write_report(read(place), tmp_path / "page")
    read_files = sorted(path for path in opened if path.endswith("record.json"))
    assert read_files == sorted(map(str, place.glob("*/record.json"))) and len(read_files) == 18


def test_several_processes_make_the_same_page_and_find_the_same_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minivllm.analysis.rows.MANY", 6)
    monkeypatch.setattr("minivllm.report.inputs.CHUNK", 2)
    monkeypatch.setattr("minivllm.platform.processes.process_pool.usable_cores", lambda: 2)
    place = write(tmp_path / "runs", make_sweep())
    torn = sorted(place.glob("*/steps.parquet"))[3]
    torn.write_bytes(torn.read_bytes()[:-4])
    pages = {}
    for name in ("alone", "shared"):
        with ProcessPool() as pool:
            inputs = read(place, pool=pool if name == "shared" else None)
            page = write_report(inputs, tmp_path / name / "page")
            assert bool(pool._processes) == (name == "shared")
        assert str(torn) in inputs.damaged
        pages[name] = {file: (page.parent / file).read_bytes() for file in os.listdir(page.parent)}
    assert pages["alone"] == pages["shared"] and torn.name in pages["alone"]["index.html"].decode()
