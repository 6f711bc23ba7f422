"""Simulated cells beside the measured ones that they predict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minivllm.analysis.cell import like_for_like
from minivllm.analysis.cells import gather
from minivllm.analysis.rows import read_rows
from minivllm.bench.records.measurement import SIMULATED
from minivllm.report.studies.simulation import simulation_check
from tests.report.pagereader import build_report
from tests.report.synthetic import make_record, write


def records(**simulated: Any) -> list[Any]:
    """Two measured cells, and one simulated one that is 10 % faster than the first."""
    real = [
        make_record(batching=batching, index=i)
        for i, batching in enumerate(("continuous", "sequential"))
    ]
    twin = make_record(batching="continuous", index=2)
    twin.arm, twin.run_id, twin.cell_id = "simulated", "sim", "other"
    twin.config["engine"] = {"_target_": SIMULATED, "steps": "runs/calibration"}
    twin.config["choices"]["engine"] = "simulated"
    twin.config["model"]["weights"] = "/elsewhere"
    twin.metrics.output_tokens_per_s = 1.1 * (real[0].metrics.output_tokens_per_s or 0)
    twin.metrics.ttft_ms.p50 = 0.8 * (real[0].metrics.ttft_ms.p50 or 0)
    for name, value in simulated.items():
        twin.config[name] |= value
    return [*real, twin]


def cells_of(folder: Path) -> list[Any]:
    return gather(read_rows(folder)[0])


def test_pairs_are_of_one_configuration(tmp_path: Path) -> None:
    cells = cells_of(write(tmp_path / "runs", records()))
    check = simulation_check(cells)
    assert check is not None and len(check.pairs) == 1
    throughput, ttft, p99 = check.pairs[0].figures
    assert throughput.error == pytest.approx(10) and ttft.error == pytest.approx(-20)
    assert p99.error is None and p99.measured == "–"  # too few requests
    assert check.summary == (
        "1 cell measured and simulated. Largest error: Output 10 %, TTFT p50 20 % and TTFT p99 – %."
    )
    assert "continuous" in check.pairs[0].label
    simulated = next(cell for cell in cells if cell.simulated)
    assert not any(like_for_like(cell, simulated) for cell in cells if cell is not simulated)


def test_a_measured_cell_that_was_also_profiled_has_its_pair(tmp_path: Path) -> None:
    pair = records()
    pair[0].config["runtime"], pair[2].config["runtime"] = {"profile": True}, {"profile": False}
    assert simulation_check(cells_of(write(tmp_path / "runs", pair))) is not None


@pytest.mark.parametrize("change", [{"batching": {"max_num_seqs": 8}}, {"measure": {"seed": 1}}])
def test_another_configuration_is_no_pair(tmp_path: Path, change: dict[str, Any]) -> None:
    assert simulation_check(cells_of(write(tmp_path / "runs", records(**change)))) is None


def test_the_page_has_the_section(tmp_path: Path, without_figures: None) -> None:
    page = build_report(write(tmp_path / "runs", records()), tmp_path / "report").read_text()
    assert "Simulation against measurement" in page and "+10.0" in page and "-20.0" in page
    assert "Some cells are measured and some simulated" in page
    page = build_report(write(tmp_path / "others", records()[:2]), tmp_path / "report").read_text()
    assert "Simulation against measurement" not in page
