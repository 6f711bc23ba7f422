"""The section on pictures that were seen before: there only where reuse differs, and true."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from minivllm.bench.records.feature_figures import EncoderFigures
from minivllm.bench.records.record import Record
from minivllm.report.inputs import ReportInputs, read
from minivllm.report.studies.images import HEADINGS, ImagesStudy, rows, seen_again, statements
from tests.report.pagereader import build
from tests.report.synthetic import make_record, make_sweep, spread, write

STUDY = ImagesStudy()


def asked(
    reuse: float, block: int, ttft_ms: float, engine: str = "minivllm", prefix: bool = False
) -> Record:
    record = make_record("nf4", "continuous", block, 0)
    record.config["choices"] |= {"workload": "images", "engine": engine}
    record.config["workload"] = {"reuse": reuse}
    record.config["cache"]["prefix_caching"] = prefix
    record.arm = f"engine={engine},workload.reuse={reuse},prefix={prefix}"
    record.cell_id = record.arm
    record.position = int(100 * reuse) + 10 * prefix + 1000 * (engine != "minivllm")
    record.run_id = f"{block}{int(reuse)}{int(prefix)}{engine}"[:12].ljust(12, "0")
    assert record.metrics is not None
    record.metrics.ttft_ms = spread(ttft_ms, 6)
    if engine == "minivllm":
        new = 1 if reuse else 6
        record.encoder = EncoderFigures(new, 6 - new, 1 - new / 6, 384, 2000.0 * new, 1e12)
    return record


def inputs_of(folder: Path, records: list[Record]) -> ReportInputs:
    write(folder / "runs", records, parquet=False)
    return read(folder / "runs")


def test_nothing_of_it_without_pictures_that_come_again(tmp_path: Path) -> None:
    page, _ = build(tmp_path, make_sweep(1))
    assert 'id="images"' not in page.source
    alike = [asked(0.0, 0, 2000.0), asked(0.0, 0, 100.0, prefix=True)]
    assert STUDY.find(inputs_of(tmp_path / "alike", alike)) is None


def test_known_pictures_are_compared_with_new_ones_of_the_same_engine(tmp_path: Path) -> None:
    records = [asked(0.0, block, 2000.0 + block) for block in range(4)]
    records += [asked(1.0, block, 100.0 + block) for block in range(4)]
    records += [asked(1.0, block, 50.0 + block, prefix=True) for block in range(4)]
    records += [asked(0.0, block, 2400.0 + block, "transformers") for block in range(4)]
    records += [asked(1.0, block, 2380.0 + block, "transformers") for block in range(4)]
    inputs = inputs_of(tmp_path, records)
    result = seen_again(inputs.cells)
    assert [one.reuse for one in result] == [0, 1, 1, 0, 1]
    ratios = [one.sooner and round(one.sooner.ratio, 2) for one in result]
    assert ratios == [None, 19.72, 38.87, None, 1.01]
    first, second, last = statements(result)
    assert re.search(r"TTFT p50 51.5 ms, 38\.9× \(\d.+ to \d.+\) shorter .* none came", first)
    assert "19.7×" in second and "1.01×" in last
    late = [replace(one, sooner=one.sooner and replace(one.sooner, ratio=0.8)) for one in result]
    assert all("1.25×" in line and " longer than" in line for line in statements(late))
    table = [dict(zip(HEADINGS, row, strict=True)) for row in rows(result)]
    assert table[0]["× new"] == "–" and table[0]["encoder (ms each)"] == "2,000"
    assert table[1]["encoder-cache hits"] == "5.00" or table[1]["encoder-cache hits"] == "5"
    assert table[3]["image tokens"] == "–"
    assert "38.9×" in STUDY.files(result, inputs)["images.md"]


@pytest.mark.usefixtures("without_figures")
def test_the_page_says_it(tmp_path: Path) -> None:
    page, _ = build(tmp_path, [asked(0.0, 0, 2000.0), asked(1.0, 0, 100.0)])
    assert 'id="images"' in page.source and "20.0× shorter" in page.text
    table = page.source.partition("<h3>Cells</h3>")[2].partition("</table>")[0]
    assert table.count('<td class="text name">') == 2 and "&#34;" not in table


def test_another_load_is_no_base(tmp_path: Path) -> None:
    records = [asked(0.0, 0, 2000.0), asked(1.0, 0, 100.0)]
    for record, width in zip(records, (64, 512), strict=True):
        record.config["workload"]["width"] = width
    assert STUDY.find(inputs_of(tmp_path, records)) is None
