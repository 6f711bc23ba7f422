"""Percentiles that were asked for: from the record, from its requests, or not at all."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from minivllm.analysis.rows import read_rows
from minivllm.bench.metrics.latency import fewest
from minivllm.bench.records import archive
from minivllm.bench.records.archive import record_files
from minivllm.bench.records.identity import cell_id
from minivllm.bench.records.storage import RECORD
from minivllm.config.compose import compose
from minivllm.errors import BadInput
from minivllm.experiments.plan import essential
from minivllm.report.inputs import read
from minivllm.report.percentiles import LATENCIES, columns, complete, too_few
from minivllm.report.results import section
from minivllm.report.studies.listed import terminal_tables
from minivllm.report.tables import COLUMNS, csv_text, markdown_text
from minivllm.tasks.report import run

RUNS = Path(__file__).parents[2] / "reports" / "examples" / "cpu" / "runs"
POISSON = RUNS / "batching.tar.xz"
# 16 requests
SMOKE = next(p for p in record_files(RUNS / "tiny-quality.tar.xz") if "bf16" in str(p)).parent


@pytest.mark.parametrize(
    ("p", "least"), [(50, 2), (90, 10), (99, 100), (99.5, 200), (99.9, 1000), (0.1, 2)]
)
def test_how_many_samples_a_percentile_takes(p: float, least: int) -> None:
    assert fewest(p) == least


@pytest.mark.parametrize("place", [POISSON, SMOKE])
def test_what_is_worked_out_from_requests_is_what_a_record_has(place: Path) -> None:
    compared = 0
    for row in read_rows(place)[0]:
        keys = [f"metrics.{metric}.p{p}" for metric in LATENCIES for p in (50, 90, 95, 99)]
        recorded = {key: row.pop(key, None) for key in keys}
        complete([row], [50, 90, 95, 99])
        for key, value in recorded.items():
            assert row.get(key) == (None if value is None else pytest.approx(value, rel=1e-9)), key
            compared += value is not None
    assert compared >= 8


def test_tables_have_those_that_were_asked_for(tmp_path: Path) -> None:
    material, usual = read(SMOKE, requested=[90, 75.5, 99]), read(SMOKE)
    heads = [
        str(column.header).split("\n")[0] for column in next(terminal_tables(material, [])).columns
    ]
    assert heads[2:10] == [
        *(
            "Output",
            "TTFT p90",
            "TTFT p75.5",
            "ITL p90",
            "ITL p75.5",
            "ITL p99",
            "TPOT p90",
            "TPOT p75.5",
        ),
    ]
    assert "E2E p75.5 (ms)" in markdown_text(material.cells, material.columns)
    shown = section(material.cells, tmp_path, material.columns)
    assert "TTFT p50" not in [column.title for column in shown["columns"]]
    assert (
        shown["absent"][0]
        == "TTFT p99, TPOT p99 and E2E p99: at least 100 requests a block are needed, there "
        "were 16."
    )
    assert too_few(material.cells, material.columns) == shown["absent"][:1]
    head, line = csv.reader(csv_text(material.cells, material.columns).splitlines())
    before = csv_text(usual.cells).splitlines()[0].split(",")
    assert head[: len(before)] == before and "metrics.tpot_ms.p75.5" in head[len(before) :]
    assert (
        float(line[head.index("metrics.tpot_ms.p75.5")]) > 0
        and line[head.index("metrics.e2e_ms.p99")] == ""
    )
    assert columns([]) is COLUMNS and usual.columns is COLUMNS


@pytest.mark.usefixtures("without_figures")
def test_without_its_requests_a_record_has_what_it_has(tmp_path: Path) -> None:
    place = tmp_path / "runs" / "old" / "one"
    place.mkdir(parents=True)
    (place / RECORD).write_bytes(archive.read_bytes(SMOKE / RECORD, 1 << 20, RECORD))
    settings: dict[str, Any] = {
        "runs": ["old"],
        "runs_dir": str(tmp_path / "runs"),
        "reports_dir": str(tmp_path / "reports"),
        "report": {"percentiles": [50.0, 80.0]},
    }
    assert run(settings) == 0
    head, line = csv.reader((tmp_path / "reports" / "old" / "table.csv").read_text().splitlines())
    found = dict(zip(head, line, strict=True))
    assert found["metrics.ttft_ms.p50"] and found["metrics.ttft_ms.p80"] == ""


@pytest.mark.parametrize(
    "value", ["[0]", "[100]", "[p99]", "[50,50]", "[1,2,3,4,5,6]", "[99.9999]", "[-1]"]
)
def test_what_is_no_percentile_is_refused(value: str) -> None:
    with pytest.raises(BadInput, match=r"report\.percentiles"):
        compose([f"report.percentiles={value}"])


def test_asking_changes_nothing_that_is_measured() -> None:
    plain, asked = compose([]), compose(["report.percentiles=[50,99.9]"])
    assert asked["report"]["percentiles"] == [50.0, 99.9]
    assert cell_id(plain, "f") == cell_id(asked, "f")
    assert essential(["report.percentiles=[50]", "quant=nf4"]) == ["quant=nf4"]
