"""What a growing load changes, by hand."""

from __future__ import annotations

from pathlib import Path

from minivllm.analysis.cells import gather
from minivllm.analysis.rows import read_rows
from minivllm.report.sweeps.loads import load_sweep, sentence
from minivllm.report.verdict import picture, verdict
from tests.analysis.test_interleaving import BUSY
from tests.report.sweeps.test_levels import cells_of
from tests.report.synthetic import make_record, write


def test_throughput_and_latency_from_the_least_load_to_the_greatest(tmp_path: Path) -> None:
    cells = cells_of(tmp_path, {("nf4", 8): 40.0, ("nf4", 1): 10.0, ("nf4", 16): 30.0})
    found = load_sweep(cells)
    assert found is not None and [load for load, _ in found.cells] == [1, 8, 16]
    text = sentence(found)
    assert text.startswith(
        "From 1 at once to 16 at once: 3.00× the output tokens/s (10.0 to 30.0), the most with 8 "
        "at once (40.0) and 1.00× the E2E p50 ("
    )
    assert verdict(cells).headline == text
    found.cells[0][1].rows[0]["validity.notes"] = [BUSY]
    assert sentence(found) == f"{text[:-1]} (1 of 6 blocks busy)."
    chart = picture(cells)
    assert chart is not None
    assert [panel.y_label.split(",")[0] for panel in chart.rows[0][1]] == [
        "output tokens/s",
        "E2E p50",
    ]


def test_what_is_no_load_has_none(tmp_path: Path) -> None:
    records = [make_record(quant, index=i) for i, quant in enumerate(("fp16", "nf4"))]
    assert load_sweep(gather(read_rows(write(tmp_path, records, parquet=False))[0])) is None
