"""The headline compares what can be compared: throughput, or latency where arrivals set the
throughput."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minivllm.analysis.cell import Cell
from minivllm.analysis.cells import gather
from minivllm.analysis.rows import read_rows
from minivllm.bench.records.figures import Metrics, Percentiles
from minivllm.bench.records.record import Record
from minivllm.experiments.ending import conclude
from minivllm.report import results
from minivllm.report.verdict import busy, verdict, with_others
from tests.report.synthetic import failed, make_record, write


def arrived(
    arm: str, ttft_ms: float | None, block: int = 0, rate: float = 4.0, **metrics: Any
) -> Record:
    """A cell whose requests came at a rate."""
    known = Percentiles(p50=ttft_ms) if ttft_ms is not None else Percentiles()
    record = make_record(
        block=block,
        arm=arm,
        cell_id=arm,
        run_id=f"{arm}{block}",
        metrics=Metrics(output_tokens_per_s=1240.0, ttft_ms=known, **metrics),
    )
    record.config["choices"]["arrival"] = "poisson"
    record.config["arrival"] = {"rate": rate}
    record.config["batching"] = {"knob": arm}
    return record


def cells_of(tmp_path: Path, *records: Record) -> list[Cell]:
    return gather(read_rows(write(tmp_path / "runs", list(records), parquet=False))[0])


def test_latencies_are_compared_where_a_rate_was_set(tmp_path: Path) -> None:
    said = verdict(
        cells_of(tmp_path, arrived("a", 2590.0), arrived("b", 30.6), arrived("c", 100.0))
    )
    assert said.headline == "Lowest TTFT p50: knob=b, 30.6 ms, against 2,590 ms of knob=a."
    assert not any("tokens/s" in line and "compare latencies" not in line for line in said.lines)
    first = verdict(cells_of(tmp_path / "first", arrived("a", 30.6), arrived("b", 12_590.0)))
    assert first.headline == "Lowest TTFT p50: knob=a, 30.6 ms, against 12.6 s of knob=b."
    assert "nothing that was varied made it lower" in first.lines[0]


def test_the_baseline_is_told_where_it_is_neither(tmp_path: Path) -> None:
    said = verdict(
        cells_of(tmp_path, arrived("a", 100.0), arrived("b", 30.6), arrived("c", 2590.0))
    )
    assert said.lines[0] == "The first cell (knob=a) had 100 ms."
    lost = failed(arrived("a", 100.0), "oom", "OutOfMemory", "no room")
    said = verdict(cells_of(tmp_path / "lost", lost, arrived("b", 30.6), arrived("c", 2590.0)))
    assert (
        said.lines[0] == "The first cell (knob=a) failed, so there is no baseline to compare with."
    )


def test_blocks_that_overlap_separate_nothing(tmp_path: Path) -> None:
    records = [
        arrived(arm, ms, block)
        for arm, figures in (("a", (30.0, 34.0)), ("b", (33.0, 36.0)))
        for block, ms in enumerate(figures)
    ]
    message = verdict(cells_of(tmp_path, *records))
    assert (
        message.headline == "Lowest TTFT p50: knob=a, 32.0 ms, not separated from knob=b, 34.5 ms."
    )
    assert (
        "Over 2 blocks it was 30.0 ms to 34.0 ms; these are least and greatest" in message.lines[1]
    )
    assert message.lines[2] == (
        "Not separated: knob=a and knob=b, the lowest two, whose "
        "difference is within the scatter of their blocks."
    )


def test_what_did_other_work_is_not_called_inseparable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], without_figures: None
) -> None:
    """Neither in the verdict nor in the terminal: a tie is a comparison, too."""
    for name, changes in (
        ("alike", {}),
        ("workloads", {"workload_hash": "another"}),
        ("devices", {"provenance": {"device": {"name": "another"}}}),
    ):
        records = [
            make_record(
                "int8", "sequential", block, index, cell_id=f"c{index}", run_id=f"{index}{block}"
            )
            for index in range(2)
            for block in range(3)
        ]
        for record in records:
            record.config["batching"]["knob"] = record.cell_id
            if record.cell_id == "c1":
                for key, value in changes.items():
                    setattr(
                        record,
                        key,
                        {**record.provenance, **value} if key == "provenance" else value,
                    )
        folder = write(tmp_path / name, records, parquet=False)
        said = verdict(gather(read_rows(folder)[0])).lines
        assert any("no ratio" in line for line in said) is (name != "alike")
        assert any(line.startswith("Not separated: ") for line in said) is (name == "alike"), name
        capsys.readouterr()
        assert conclude(folder, tmp_path / "out" / name, {})
        assert ("Not separated: " in capsys.readouterr().out) is (name == "alike"), name


def test_a_tie_of_two_that_did_the_same_is_told_beside_cells_that_did_not(tmp_path: Path) -> None:
    records = []
    for index, (work, figures) in enumerate(
        (("x", (9.0, 9.4)), ("x", (9.2, 9.5)), ("y", (5.0, 5.1)))
    ):
        for block, figure in enumerate(figures):
            record = make_record(
                block=block, index=index, cell_id=f"c{index}", run_id=f"{index}{block}"
            )
            record.workload_hash, record.metrics.output_tokens_per_s = work, figure
            record.config["batching"]["knob"] = f"c{index}"
            records.append(record)
    said = verdict(cells_of(tmp_path, *records))
    assert (
        said.headline
        == "Fastest: knob=c1 at 9.35 output tokens/s, not separated from knob=c0 at 9.20."
    )
    lines = said.lines
    assert any("different workloads" in line for line in lines)
    assert (
        "Not separated: knob=c1 and knob=c0, the fastest two, whose "
        "difference is within the scatter of their blocks." in lines
    )


def test_a_tie_is_no_reason_to_hide_that_a_third_is_slower(tmp_path: Path) -> None:
    records = []
    for index, figures in enumerate(((9.0, 9.4), (9.2, 9.5), (5.0, 5.1))):
        for block, figure in enumerate(figures):
            record = make_record(
                block=block, index=index, cell_id=f"c{index}", run_id=f"{index}{block}"
            )
            record.metrics.output_tokens_per_s = figure
            record.config["batching"]["knob"] = f"c{index}"
            records.append(record)
    assert verdict(cells_of(tmp_path, *records)).headline == (
        "Fastest: knob=c1 at 9.35 output tokens/s, not separated from knob=c0 at 9.20, "
        "1.85× the slowest (knob=c2, 5.05)."
    )
    assert "the slowest" not in verdict(cells_of(tmp_path / "two", *records[:4])).headline


def test_latencies_at_other_rates_are_not_called_inseparable(tmp_path: Path) -> None:
    records = [
        arrived(arm, ms, block, rate)
        for arm, rate, figures in (("a", 4.0, (30.0, 34.0)), ("b", 8.0, (33.0, 36.0)))
        for block, ms in enumerate(figures)
    ]
    assert not any("Not separated" in line for line in verdict(cells_of(tmp_path, *records)).lines)


def test_other_rates_are_not_held_against_each_other(tmp_path: Path) -> None:
    message = verdict(cells_of(tmp_path, arrived("a", 30.6), arrived("b", 2590.0, rate=8.0)))
    assert message.headline.startswith("From 4 requests/s to 8 requests/s: ")
    assert "against" not in message.headline
    assert "Requests arrived at different rates" in message.lines[0]


def test_without_ttft_it_is_the_whole_time_and_without_any_the_throughput(tmp_path: Path) -> None:
    whole = [
        arrived(arm, None, e2e_ms=Percentiles(p50=ms)) for arm, ms in (("a", 900.0), ("b", 500.0))
    ]
    said = verdict(cells_of(tmp_path, *whole))
    assert said.headline == "Lowest E2E p50: knob=b, 500 ms, against 900 ms of knob=a."
    said = verdict(cells_of(tmp_path / "none", arrived("a", None), arrived("b", None)))
    assert said.headline.startswith("Fastest: ")


def test_a_ratio_is_coloured_where_no_blocks_meet(tmp_path: Path) -> None:
    speeds = {
        "first": (100.0, 104.0),
        "more": (120.0, 125.0),
        "less": (90.0, 95.0),
        "alike": (103.0, 110.0),
    }
    records = []
    for arm, figures in speeds.items():
        for block, speed in enumerate(figures):
            record = make_record(block=block, arm=arm, cell_id=arm, run_id=f"{arm}{block}")
            record.metrics.output_tokens_per_s = speed
            record.config["batching"] = {"knob": arm}
            records.append(record)
    cells = cells_of(tmp_path, *records)
    shown = results.section(cells, tmp_path)["rows"]
    assert {row["names"][0]: row["tinge"] for row in shown} == {
        "first": "",
        "more": "better",
        "less": "worse",
        "alike": "",
    }
    alone = results.section(cells_of(tmp_path / "one", *records[::2]), tmp_path)["rows"]
    assert {row["tinge"] for row in alone} == {""}  # of single blocks nothing is known


@pytest.mark.parametrize(("taken", "said"), [(None, False), (0.09, False), (0.18, True)])
def test_what_others_took_stands_in_the_headline(taken: float | None, said: bool) -> None:
    rows: list[dict[str, Any]] = [
        {
            "cell_id": "c",
            "arm": "a",
            "block": block,
            "status": "ok",
            "metrics.output_tokens_per_s": 10.0,
            "validity.notes": ["other processes used 36 % of a core"],
            "validity.cpu_taken": share,
        }
        for block, share in enumerate((0.01, taken))
    ]
    cells = gather(rows)
    words = "up to 18 % of the processor time of the cores that the run uses"
    headline = with_others(verdict(cells), cells).headline
    assert headline.endswith(f"Meanwhile other processes took {words}.") is said
    (line,) = busy(cells)
    assert (f"measured ({words}): figures" in line) is said
