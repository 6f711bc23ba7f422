"""What is simulated is never shown as measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minivllm.analysis.cells import gather
from minivllm.analysis.rows import read_rows
from minivllm.bench.records.measurement import SIMULATED
from minivllm.bench.records.record import Record, Validity
from minivllm.experiments.ending import conclude
from minivllm.report import notices
from tests.report.pagereader import build
from tests.report.synthetic import make_record, write

pytestmark = pytest.mark.usefixtures("without_figures")

ROOFLINE = {"steps": None, "bandwidth_gb_s": 3350.0, "tflops": 600.0, "overhead_ms": 2.0}
FITTED = {"steps": "runs/fit", "bandwidth_gb_s": None, "tflops": None, "overhead_ms": 0.0}


def predicted(quant: str = "nf4", index: int = 0, engine: dict[str, Any] = ROOFLINE) -> Record:
    """As older versions recorded it: with a note on weights that there are none of."""
    record = make_record(quant, index=index, run_id=f"simulated{index}")
    record.config["engine"] = {"_target_": SIMULATED, **engine}
    record.config["choices"]["engine"] = "simulated"
    note = "weights are random: speed and memory are the real model's, its text is noise"
    record.validity = Validity(True, [], [note, "simulated: step times from the roofline"])
    return record


def test_a_simulation_says_so_and_nothing_of_weights_devices_or_noise(tmp_path: Path) -> None:
    page, _ = build(tmp_path, [predicted(), predicted("int8", 1)])
    assert (
        "Simulated: nothing was computed; times are those of a model of 3,350 GB/s and 600 "
        "TFLOP/s with 2 ms a step besides." in page.text
    )
    assert "Device simulated" in page.text and "Weights not loaded" in page.text
    assert "andom" not in page.text and "Device AMD" not in page.text
    assert "three blocks" not in page.text and "noise" not in page.text
    # the other note is still there
    assert "note simulated: step times from the roofline" in page.text


def test_fitted_times_name_their_records(tmp_path: Path) -> None:
    page, _ = build(tmp_path, [predicted(engine=FITTED)])
    assert "times are those of a model fitted to the steps recorded in runs/fit." in page.text


def test_a_page_of_both_says_which_is_which(tmp_path: Path) -> None:
    page, _ = build(tmp_path, [make_record(), predicted("int8", 1)])
    assert "Partly simulated: in the 1 cell with engine=simulated nothing was computed" in page.text
    assert (
        "The other cells were measured." in page.text
        and "Random weights in some cells." in page.text
    )
    assert "Device AMD EPYC 7R13 and simulated" in page.text
    assert "Some cells were measured once, so there is no interval" in page.text


def test_simulated_cells_are_named_where_their_engine_does_not_tell_them(tmp_path: Path) -> None:
    records = [make_record(), predicted("int8", 1)]
    records[1].config["choices"]["engine"] = "minivllm"
    found = notices.simulated(gather(read_rows(write(tmp_path, records))[0]))
    assert found is not None and found.text.startswith("in int8 · bandwidth_gb_s=3350 ·")


def test_random_weights_of_measured_cells_are_told_as_before(tmp_path: Path) -> None:
    page, _ = build(tmp_path / "random", [make_record(), make_record("int8", index=1)])
    assert "Random weights. Speed" in page.text and "imulated" not in page.text.split("Glossary")[0]
    page, _ = build(tmp_path / "known", [make_record(weights="checkpoint")])
    assert "Random weights" not in page.text


def test_the_terminal_says_so_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert conclude(write(tmp_path / "runs", [predicted()]), tmp_path / "out", {})
    assert (
        "Simulated: nothing was computed; times are those of a model of 3,350"
        in capsys.readouterr().out
    )
    assert conclude(write(tmp_path / "others", [make_record()]), tmp_path / "out", {})
    assert "imulated" not in capsys.readouterr().out
