"""task=report: what it says in the terminal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minivllm.bench.records.record import KERNELS_VERSION
from tests.report.synthetic import make_record, write


def test_what_could_not_be_read_is_counted(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "minivllm.report.page.write_report", lambda inputs, out_dir, studies: out_dir
    )
    write(Path("runs"), [make_record(sweep="old", run_id=f"{i}") for i in range(2)], parquet=False)
    min(Path("runs/old").glob("*/record.json")).write_text("{")
    done = cli("task=report", "runs=[old]")
    assert (done.code, done.out) == (0, "report: reports/old\n")
    assert done.err == (
        "warning: 1 unreadable record left out, 2 tables missing or torn: the report names them "
        "under Validity\n"
    )


def test_runs_may_lie_in_the_home_folder(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "minivllm.report.page.write_report", lambda inputs, out_dir, studies: out_dir
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "mine", [make_record(sweep="old", run_id="0")], parquet=False)
    assert cli("task=report", "runs=['~/mine/old']").code == 0
    assert cli("task=report", "runs=['~/mine/older']").err.startswith(
        f"error: runs: no records at {tmp_path}/mine/older; "
    )


def test_a_damaged_record_of_kernels_is_left_out(cli: Callable[..., Any]) -> None:
    for name, rows in (("torn", 5), ("other", [7])):
        folder = Path("runs") / name
        folder.mkdir(parents=True)
        (folder / "kernels.json").write_text(
            json.dumps(
                {"kind": "kernels", "schema_version": KERNELS_VERSION, "config": {}, "rows": rows}
            )
        )
    alone = cli("task=report", "runs=[torn]")
    assert alone.code == 2 and "kernels.json is damaged" in alone.err and alone.err.count("\n") == 1
    both = cli("task=report", "runs=[torn,other]")
    assert both.code == 0 and both.err.count("left out") == 2
