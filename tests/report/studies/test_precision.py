"""The precision section: there only if records have quality, true to them, and the line of the
best."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from minivllm.bench.records.feature_figures import Quality
from minivllm.bench.records.figures import Metrics
from minivllm.bench.records.identity import QUALITY_TASK
from minivllm.bench.records.record import Record, Validity
from minivllm.report.figures.scatter import frontier
from minivllm.report.inputs import read
from minivllm.report.studies.listed import findings, terminal_tables
from minivllm.report.studies.precision import MEMORY, headline, pareto
from tests.report.pagereader import build, table
from tests.report.synthetic import failed, make_record, make_sweep, write

KL = {"fp16": 0.0002, "int8": 0.0011, "nf4": 0.031}


def judged(quant: str, block: int = 0, index: int = 0, **changes: Any) -> Record:
    quality = Quality(
        perplexity=15.0 + 20 * KL[quant],
        bits_per_byte=0.98,
        tokens=8191,
        kl_mean=KL[quant],
        kl_p99=5 * KL[quant],
        kl_tokens=4000,
        top1_agreement=1 - 3 * KL[quant],
        prefix_mean=40.5,
        prefix_min=2,
        prefix_of=64,
        prompts=8,
        reference="fp32",
        reference_id="abc",
        reference_perplexity=15.0,
    )
    record = make_record(
        quant, "continuous", block, index, quality=quality, weights="checkpoint", **changes
    )
    record.memory.linear, record.memory.linear_16bit = (
        record.memory.weights,
        record.memory.weights_16bit,
    )
    return record


def sweep_with_quality() -> list[Record]:
    records = [judged(quant, block, i) for block in range(2) for i, quant in enumerate(KL)]
    for record in records:
        record.config["measure"]["quality"] = True
    return records


def rendered(folder: Path, width: int = 120) -> str:
    from rich.console import Console

    console = Console(file=StringIO(), width=width)
    inputs = read(folder)
    for one in terminal_tables(inputs, findings(inputs)):
        console.print(one)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_row_that_was_not_alone_is_marked_in_every_table(tmp_path: Path) -> None:
    busy = Validity(True, [], ["other processes used 98 % of a core on average during the window"])
    _, out = build(tmp_path, [judged("fp16", validity=busy), judged("nf4", index=1)])
    for name in ("table.md", "precision.md"):
        assert (out / name).read_text().count("| fp16 | ok, busy |") == 1, name


def test_nothing_of_it_without_quality(tmp_path: Path) -> None:
    (tmp_path / "reports" / "r").mkdir(parents=True)
    for name in ("precision.md", "precision.png"):
        (tmp_path / "reports" / "r" / name).write_text("of an earlier report")
    page, out = build(tmp_path, make_sweep(1))
    assert 'id="precision"' not in page.source and "KL" not in page.text
    assert not (out / "precision.md").exists() and not (out / "precision.png").exists()
    inputs = read(tmp_path / "runs")
    assert len([*terminal_tables(inputs, findings(inputs))]) == 1


def test_names_with_brackets_are_shown_whole(tmp_path: Path) -> None:
    records = [judged("int8", block, 0) for block in range(2)]
    for record, skip in zip(records, (["lm_head"], ["/x"]), strict=True):
        record.cell_id = record.arm = f"quant.skip={skip}"
        record.config["quant"]["skip"] = skip
    text = rendered(write(tmp_path, records))
    assert text.count("[lm_head]") == 2 and text.count("[/x]") == 2  # in both tables


def test_quality_that_was_measured_alone_is_no_block_of_the_speed(tmp_path: Path) -> None:
    """Nor are its memory and its counters those of the load."""
    timed, alone = judged("int8", 0, 0), judged("int8", 0, 0)
    alone.run_id = "0"
    alone.config["task"] = {"_target_": QUALITY_TASK}
    alone.metrics, alone.liveness = type(alone.metrics)(), {}
    assert timed.memory.host_rss_peak is not None
    alone.memory.host_rss_peak = 9 * timed.memory.host_rss_peak
    (cell,) = read(write(tmp_path, [timed, alone])).cells
    assert (len(cell.ok), cell.blocks) == (2, "1/1")
    assert cell.mean("memory.host_rss_peak") == timed.memory.host_rss_peak
    stat = cell.summary("quality.perplexity")
    assert stat is not None and stat.n == 2


def test_everything_side_by_side(tmp_path: Path) -> None:
    page, out = build(tmp_path, sweep_with_quality())
    lines = [
        line.strip("| ").split(" | ") for line in (out / "precision.md").read_text().splitlines()
    ]
    rows = {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines[2:]}
    assert list(rows) == ["fp16", "int8", "nf4"]
    nf4 = rows["nf4"]
    assert (
        nf4["Perplexity"] == "15.62"
        and nf4["KL, mean (nats)"] == "0.0310"
        and nf4["Top-1 (%)"] == "90.7"
    )
    assert nf4["Linear layers (% of 16-bit)"] == "46.2" and nf4["Weights (GB)"] == "0.550"
    assert nf4["Prefix, mean (tokens)"] == "40.5" and nf4["Prefix, least (tokens)"] == "2"
    assert "TPOT p50 (ms)" in nf4 and "TTFT p50 (ms)" in nf4 and "ITL p50 (ms)" in nf4
    assert "Energy (J/token)" not in nf4
    section = page.source[page.source.index('id="precision"') : page.source.index('id="speed"')]
    assert "J/token: no RAPL counter is readable" in section
    assert (
        "over 8,191 tokens, KL(fp32 ‖ cell) over 4,000" in section
        and "of 64, over 8 prompts" in section
    )
    assert (
        'aria-label="Scatter of mean KL' in section
        and (out / "precision.png").read_bytes()[1:4] == b"PNG"
    )
    assert (
        "Quality: KL to fp32 is 0.000200 nats in fp16" in page.text
        and "0.0310 nats in nf4" in page.text
    )
    assert float(table(out)["nf4"]["quality.kl_mean"]) == 0.031
    opening, first, *_ = page.attributes("img", "alt")
    assert opening.startswith("How fast is each precision") and first.startswith("Scatter")
    assert len(page.attributes("img", "src")) == 10


def test_memory_is_drawn_where_cells_differ_in_it(tmp_path: Path) -> None:
    """fp16 is largest and best, nf4 smallest and worst; int8 is between, but for its size."""
    records = sweep_with_quality()
    sizes = {"fp16": 4e9, "int8": 2e9, "nf4": 2e9}
    for record in records:
        record.memory.weights = int(sizes[record.config["choices"]["quant"]])
    inputs = read(write(tmp_path, records, parquet=False))
    chart = pareto(inputs.cells, inputs.styles, MEMORY)
    assert chart is not None and chart.name == "precision_memory"
    assert "Beaten by none in KL and memory at once: fp16 and int8." in chart.alt
    ((_, panels),) = chart.rows
    line = panels[0].series[0]
    assert list(line.x) == [4.0, 2.0] and list(line.y) == [KL["fp16"], KL["int8"]]
    for record in records:
        record.memory.weights = 1
    inputs = read(write(tmp_path / "same", records, parquet=False))
    assert pareto(inputs.cells, inputs.styles, MEMORY) is None
    assert pareto(inputs.cells, inputs.styles) is not None


@pytest.mark.usefixtures("without_figures")
def test_energy_is_there_where_it_was_read(tmp_path: Path) -> None:
    records = sweep_with_quality()
    for record in records:
        record.energy.joules_per_output_token = 1.5
    _, out = build(tmp_path, records)
    assert "Energy (J/token)" in (out / "precision.md").read_text().splitlines()[0]


@pytest.mark.usefixtures("without_figures")
def test_a_cell_that_failed_is_a_row_and_one_that_was_not_asked_is_none(tmp_path: Path) -> None:
    records = sweep_with_quality()
    records[-1:] = []
    lost = next(record for record in records if record.config["choices"]["quant"] == "nf4")
    failed(lost, "oom", "MemoryError", "no more")
    lost.quality = None
    _, out = build(tmp_path, [*records, make_record("fp16", "sequential", weights="checkpoint")])
    rows = (out / "precision.md").read_text().splitlines()[2:]
    assert len(rows) == 3 and rows[2].startswith("| nf4 | continuous | oom | – |")


@pytest.mark.parametrize(
    ("quants", "told"),
    [
        (("fp16",), "is 0.000200 nats in quant=fp16,batching=continuous ("),
        (("fp16", "nf4"), "is 0.0310 nats in nf4 ("),
        (
            ("fp16", "int8", "nf4"),
            "is 0.00110 nats in int8 (top-1 the same for 99.7 %) and 0.0310 nats in nf4 (",
        ),
    ],
)
def test_the_reference_is_not_held_against_itself(
    tmp_path: Path, quants: tuple[str, ...], told: str
) -> None:
    records = [judged(quant) for quant in quants]
    for record in records:
        assert record.quality is not None
        record.quality.reference = "fp16"
    (message,) = headline(read(write(tmp_path, records, parquet=False)).cells)
    assert message.startswith(f"Quality: KL to fp16 {told}") and message.count(
        "nats"
    ) == told.count("nats")


@pytest.mark.usefixtures("without_figures")
def test_different_references_are_not_compared(tmp_path: Path) -> None:
    records = sweep_with_quality()
    assert records[0].quality is not None
    records[0].quality.reference_id = "other"
    page, _ = build(tmp_path, records)
    assert "must not be compared with each other" in page.text


def test_quality_alone_has_one_table_and_no_plot_of_speed(tmp_path: Path) -> None:
    records = sweep_with_quality()
    for record in records:
        record.metrics = Metrics()
        record.config["task"] = {"_target_": QUALITY_TASK}
    page, out = build(tmp_path, records, parquet=False)
    assert page.text.count("Quality: KL to fp32 is") == 1 and "nothing to compare" not in page.text
    assert "TTFT p99: at least" not in page.text  # of what only a load has
    assert (
        not (out / "precision.png").exists() and "tok/s" not in (out / "precision.md").read_text()
    )
    assert "× first" not in (out / "table.md").read_text()
    text = rendered(tmp_path / "runs", 80)
    assert "Perplexity" in text and "Output" not in text and text.count("nf4") == 1
    assert all(len(line) <= 80 for line in text.splitlines())


def test_speed_and_quality_measured_apart_are_one_row(tmp_path: Path) -> None:
    timed, alone = make_record("nf4"), judged("nf4")
    alone.run_id, alone.metrics = "other", Metrics()
    alone.config["task"] = {"_target_": QUALITY_TASK}
    write(tmp_path / "runs", [timed, alone])
    text = rendered(tmp_path / "runs")
    assert text.count("15.62") == 1 and "62." in text


def test_the_settings_of_quality_vary_only_where_it_was_measured(tmp_path: Path) -> None:
    records = [judged("fp16"), judged("int8"), make_record("nf4")]
    for record, window in zip(records, (512, 512, 64), strict=True):
        record.config["quality"] = {"window": window}
    _, out = build(tmp_path, records, parquet=False)
    assert "quality.window" not in (out / "table.md").read_text()


def test_frontier_by_hand() -> None:
    points = [(10.0, 0.5), (20.0, 0.2), (30.0, 0.3), (5.0, 0.2), (30.0, 0.9), (40.0, 0.4)]
    assert frontier(points) == [1, 2, 5]
    assert frontier([(1.0, 1.0)]) == [0]
