"""Which option for which load, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from minivllm.analysis.cell import Cell
from minivllm.analysis.cells import gather
from minivllm.analysis.rows import read_rows
from minivllm.bench.records.record import Record
from minivllm.report.sweeps.levels import levels_of, runs, sentence
from minivllm.report.verdict import answer, picture, verdict
from tests.analysis.test_interleaving import BUSY
from tests.report.synthetic import make_record, write

Speeds = dict[tuple[str, int], float]  # tokens a second by precision and requests at once


def record(quant: str, batch: int, speed: float, block: int) -> Record:
    name = f"{quant}-{batch}"
    made = make_record(quant, block=block, arm=name, cell_id=name, run_id=f"{name}-{block}")
    made.config["arrival"] = {"concurrency": batch}
    made.workload_hash = "the same"
    made.metrics.output_tokens_per_s = speed * (1 + 0.001 * block)
    return made


def cells_of(folder: Path, speeds: Speeds, blocks: int = 3) -> list[Cell]:
    records = [record(*at, speed, block) for block in range(blocks) for at, speed in speeds.items()]
    return gather(read_rows(write(folder, records, parquet=False))[0])


def test_the_best_is_found_for_each_load(tmp_path: Path) -> None:
    """Not the fastest of all cells, which is that of the greatest load."""
    cells = cells_of(
        tmp_path,
        {("fp16", 1): 10, ("nf4", 1): 15, ("fp16", 16): 120, ("nf4", 16): 80},
    )
    found = levels_of(cells)
    assert found is not None and found.is_load
    assert (found.option, found.of, found.options) == (
        "quant",
        "arrival.concurrency",
        ("fp16", "nf4"),
    )
    assert [(run.options, run.where) for run in runs(found)] == [
        (("nf4",), "1 at once"),
        (("fp16",), "16 at once"),
    ]
    text = "The fastest: at 1 at once nf4 (1.50× fp16), at 16 at once fp16 (1.50× nf4)."
    assert sentence(found) == verdict(cells).headline == text
    chart = picture(cells)
    assert chart is not None and [*chart.legend] == ["fp16", "nf4"]
    (panel,) = chart.rows[0][1]
    hollow = [series.x for series in panel.series if series.kind == "points" and series.hollow]
    assert hollow == [[16.0], [1.0]] or hollow == [[1.0], [16.0]]  # what is not the best there


def test_neighbouring_loads_with_one_answer_are_told_together(tmp_path: Path) -> None:
    speeds: Speeds = {}
    for batch, (fp16, nf4) in {1: (10, 20), 2: (20, 30), 4: (40, 40.01), 8: (90, 60)}.items():
        speeds |= {("fp16", batch): fp16, ("nf4", batch): nf4}
    found = levels_of(cells_of(tmp_path, speeds))
    assert found is not None
    assert sentence(found) == (
        "The fastest: at 1 at once to 2 at once nf4 (1.50× to 2.00× fp16), at 4 at once nf4 or "
        "fp16 (not separated), at 8 at once fp16 (1.50× nf4)."
    )


@pytest.mark.parametrize(
    ("fp16", "said"),
    [
        (10.0, "nf4 is the fastest at every load (1.50× fp16)."),
        (15.0, "nf4 and fp16 are the fastest at every load (not separated)."),
    ],
)
def test_one_answer_for_every_load_is_one(fp16: float, said: str, tmp_path: Path) -> None:
    speeds = {
        (quant, batch): batch * speed
        for batch in (1, 4)
        for quant, speed in (("fp16", fp16 - 1e-4), ("nf4", 15.0))
    }
    found = levels_of(cells_of(tmp_path, speeds))
    assert found is not None and sentence(found) == said


def test_a_sweep_of_one_knob_or_of_one_answer_is_ranked(tmp_path: Path) -> None:
    assert levels_of(cells_of(tmp_path / "one", {("fp16", 1): 10, ("nf4", 1): 15})) is None
    records = [
        make_record(quant, batching, block, i)
        for block in range(3)
        for i, (quant, batching) in enumerate(
            (quant, batching)
            for quant in ("fp16", "nf4")
            for batching in ("sequential", "continuous")
        )
    ]
    cells = gather(read_rows(write(tmp_path / "two", records, parquet=False))[0])
    assert answer(cells) is None  # one option is the best with either way of batching


@pytest.mark.parametrize("speeds", [(10, 15, 120, 80), (10, 15, 80, 120)], ids=["two", "one"])
def test_busy_blocks_of_what_is_compared_are_counted(
    tmp_path: Path, speeds: tuple[float, ...]
) -> None:
    names = ("fp16", 1), ("nf4", 1), ("fp16", 16), ("nf4", 16)
    cells = cells_of(tmp_path, dict(zip(names, speeds, strict=True)))
    cells[1].rows[0]["validity.notes"] = [BUSY]
    found = levels_of(cells)
    assert found is not None and sentence(found).endswith(") (1 of 12 blocks busy).")


def test_levels_that_were_measured_apart_say_so(tmp_path: Path) -> None:
    """All blocks of one cell, then those of the next: the best is named, and no order is shown."""
    records = []
    for place, (batch, quant, speed) in enumerate(
        [(1, "fp16", 10.0), (1, "nf4", 15.0), (16, "fp16", 120.0), (16, "nf4", 80.0)]
    ):
        for block in range(3):
            made = record(quant, batch, speed, block)
            made.provenance["started_at"] = f"2025-03-04T{10 + place}:{block:02d}:00+0000"
            records.append(made)
    cells = gather(read_rows(write(tmp_path, records, parquet=False))[0])
    found = levels_of(cells)
    assert found is not None and sentence(found) == (
        "The fastest: at 1 at once nf4 (1.50× fp16, measured apart), at 16 at once fp16 (1.50× "
        "nf4, measured apart)."
    )
