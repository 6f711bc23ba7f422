"""Which precision to take, and what it costs in quality."""

from __future__ import annotations

from pathlib import Path

from minivllm.analysis.cell import Cell
from minivllm.analysis.cells import gather
from minivllm.analysis.rows import read_rows
from minivllm.bench.records.record import Record
from minivllm.report.sweeps.precisions import picture, precisions, sentence
from minivllm.report.verdict import verdict
from tests.report.studies.test_precision import judged
from tests.report.synthetic import write


def cells_of(folder: Path, records: list[Record]) -> list[Cell]:
    return gather(read_rows(write(folder, records, parquet=False))[0])


def test_one_load_has_a_precision_for_speed_and_one_for_memory(tmp_path: Path) -> None:
    cells = cells_of(
        tmp_path,
        [
            judged(quant, block, i)
            for block in range(2)
            for i, quant in enumerate(("fp16", "nf4", "int8"))
        ],
    )
    found = precisions(cells)
    assert found is not None and found.levels is None
    text = (
        "Take int8 for speed (1.58× the output tokens/s of fp16; KL 0.0011, top-1 99.7 %), nf4 for "
        "memory (0.733× the weights of int8; KL 0.031, top-1 90.7 %)."
    )
    assert sentence(found) == verdict(cells).headline == text
    chart = picture(found)
    assert chart is not None
    (panel,) = chart.rows[0][1]
    assert panel.rows[1].startswith("nf4 (KL 0.031")


def test_several_loads_have_a_precision_each(tmp_path: Path) -> None:
    speeds = {("fp16", 1): 10.0, ("nf4", 1): 15.0, ("fp16", 16): 120.0, ("nf4", 16): 80.0}
    records = []
    for block in range(3):
        for (quant, batch), speed in speeds.items():
            name = f"{quant}-{batch}"
            made = judged(quant, block, arm=name, cell_id=name, run_id=f"{name}-{block}")
            made.config["arrival"] = {"concurrency": batch}
            made.metrics.output_tokens_per_s = speed * (1 + 0.001 * block)
            records.append(made)
    cells = cells_of(tmp_path, records)
    found = precisions(cells)
    assert found is not None and found.levels is not None
    assert verdict(cells).headline == (
        "Take nf4 if your load is 1 at once (1.50× fp16; KL 0.031, top-1 90.7 %), fp16 if your "
        "load is 16 at once (1.50× nf4; KL 0.00020, top-1 99.9 %)."
    )
    chart = picture(found)
    assert chart is not None and [*chart.legend][1].startswith("nf4: KL 0.031")


def test_batching_is_told_apart_where_the_load_is_one(tmp_path: Path) -> None:
    """Which precision is the fastest depends on how many requests a step has."""
    speeds = {"sequential": {"fp16": 10.0, "nf4": 15.0}, "continuous": {"fp16": 120.0, "nf4": 80.0}}
    records = []
    for block in range(3):
        for batching, by_quant in speeds.items():
            for quant, speed in by_quant.items():
                name = f"{quant}-{batching}"
                made = judged(quant, block, arm=name, cell_id=name, run_id=f"{name}-{block}")
                made.config["choices"]["batching"] = batching
                made.metrics.output_tokens_per_s = speed * (1 + 0.001 * block)
                records.append(made)
    assert verdict(cells_of(tmp_path, records)).headline == (
        "Take fp16 if batching is continuous (1.50× nf4; KL 0.00020, top-1 99.9 %), nf4 if "
        "batching is sequential (1.50× fp16; KL 0.031, top-1 90.7 %)."
    )
