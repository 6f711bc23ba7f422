"""Tables for the terminal and for READMEs, number formats, and the task around them."""

from __future__ import annotations

import csv
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from minivllm.analysis.cells import gather, varying_columns
from minivllm.analysis.format import listing, sig
from minivllm.analysis.rows import read_rows
from minivllm.bench.records.figures import Attainment, DeviceFigures, Devices, Percentiles
from minivllm.bench.records.identity import QUALITY_TASK
from minivllm.bench.records.record import Ablation
from minivllm.errors import BadInput
from minivllm.report.inputs import read
from minivllm.report.provenance import provenance
from minivllm.report.tables import csv_text, markdown_text, summary_table
from minivllm.tasks.report import find_runs, joined_name, run
from tests.report.pagereader import build_report
from tests.report.synthetic import make_record, write

pytestmark = pytest.mark.usefixtures("without_figures")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (float("nan"), "–"),
        (0.0, "0"),
        (1.0, "1.00"),
        (0.0188, "0.0188"),
        (9.996, "10.00"),
        (123.4, "123"),
        (69812.0, "69,800"),
        (-2.5, "-2.50"),
        (0.00000123, "1.23e-06"),
    ],
)
def test_significant_digits(value: float | None, text: str) -> None:
    assert sig(value) == text


def test_listing_counts_what_it_leaves_out() -> None:
    assert listing(["a"]) == "a"
    assert listing(["a", "b", "c"]) == "a, b and c"
    assert listing(["a", "b", "c"], 2) == "a, b and 1 more"


def rendered(table: Any, width: int = 120) -> str:
    from rich.console import Console

    out = StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue()


def test_summary_has_a_row_a_cell_and_the_main_figures(sweep: Path) -> None:
    text = rendered(summary_table(read(sweep).cells))
    rows = [line for line in text.splitlines() if " ok " in line or " oom " in line]
    assert len(rows) == 6
    best = next(line for line in rows if "int8" in line and "continuous" in line)
    assert "76.6" in best and "6.89" in best and "0.750" in best
    assert "oom" in rows[-1]


def test_summary_of_one_record_has_no_ratio(tmp_path: Path) -> None:
    text = rendered(summary_table(read(write(tmp_path, [make_record(arm="[red]odd[/red]")])).cells))
    assert "× first" not in text
    assert "[red]odd[/red]" in text  # names are not markup


def test_objectives_thoughts_and_devices_are_columns_where_there_are_any(tmp_path: Path) -> None:
    plain, full = make_record("fp16"), make_record("int8", index=1)
    full.metrics.attainment, full.metrics.goodput_tokens_per_s = Attainment(all=0.375), 321.0
    full.metrics.ttfo_ms = Percentiles(mean=7.0, p50=7.5, n=2)
    full.devices = Devices(count=2, output_tokens_per_s=222.0, each=[DeviceFigures()] * 2)
    names = ("SLO met", "Good output", "TTFO p50", "Output per device")
    cells = read(write(tmp_path / "one", [plain])).cells
    assert not any(name in rendered(summary_table(cells)) for name in names)
    assert "metrics.attainment" not in csv_text(cells)
    root = write(tmp_path / "both", [plain, full])
    cells = read(root).cells
    assert "SLO met" in rendered(summary_table(cells)) and "37.5" in rendered(summary_table(cells))
    page = build_report(root, root / "out").read_text()
    assert all(name in page for name in names)
    row = list(csv.DictReader(StringIO(csv_text(cells))))[1]
    assert float(row["devices.output_tokens_per_s"]) == 222


def test_the_time_to_load_is_a_column_where_cells_keep_packed_weights_or_not(
    tmp_path: Path,
) -> None:
    records = [make_record(cell_id=f"cell{index}", run_id=f"r{index}") for index in range(2)]
    assert "Load" not in rendered(summary_table(read(write(tmp_path / "one", records)).cells))
    for record, kept, seconds in zip(records, ("off", "auto"), (3.21, 0.234), strict=True):
        record.config["model"] = {**record.config["model"], "packed_cache": kept}
        record.cold.load_s = seconds
    table = rendered(summary_table(read(write(tmp_path / "two", records)).cells), 200)
    assert all(word in table for word in ("Load", "3.21", "0.234"))


def test_throughput_that_the_arrivals_set_is_no_ratio(tmp_path: Path) -> None:
    """Twice the requests a second are twice the tokens a second: terminal, Markdown and page say
    nothing of it."""

    def tables(**rates: float) -> list[str]:
        records = [make_record(quant, index=i) for i, quant in enumerate(rates)]
        for record, rate in zip(records, rates.values(), strict=True):
            record.config["choices"]["arrival"] = "poisson"
            record.config["arrival"] = {"rate": rate}
        root = write(tmp_path / "-".join(map(str, rates.values())), records)
        page = build_report(root, root / "out").read_text()
        return [
            rendered(summary_table(read(root).cells)),
            (root / "out" / "table.md").read_text(),
            page,
        ]

    assert not any("× first" in text for text in tables(fp16=1, int8=2))
    assert all("× first" in text for text in tables(fp16=2, int8=2))
    _, markdown, _ = tables(fp16=1, int8=1, nf4=2)
    head, _, *lines = (line.split(" | ") for line in markdown.splitlines())
    first, alike, faster = (line[head.index("× first")] for line in lines)
    assert first == "1.00" and float(alike) > 1 and faster == "–"


def test_arms_of_an_ablation_are_named_and_not_told_by_their_knobs(tmp_path: Path) -> None:
    stands = Ablation("leave_one_out", "output_tokens_per_s", ["int8"], {}, ["int8"], 0, 0)
    records = [
        make_record(arm="baseline", run_id="r0", ablation=stands),
        make_record(arm="baseline again", run_id="r1", ablation=stands),
        make_record("fp16", arm="without int8", run_id="r2", ablation=stands, index=1),
    ]
    build_report(write(tmp_path / "runs", records), tmp_path / "out")
    lines = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert [line.split(" | ")[0].strip("| ") for line in lines] == [
        *("arm", ":--"),
        *("baseline", "baseline again", "without int8"),
    ]
    assert "without int8" in rendered(summary_table(read(tmp_path / "runs").cells))


def test_a_knob_that_changes_no_number_is_no_column(tmp_path: Path) -> None:
    records = [
        make_record(batching=batching, index=i)
        for i, batching in enumerate(("continuous", "sequential"))
    ]
    for i, record in enumerate(records):
        record.config["runtime"] = {"profile": bool(i), "threads": i + 1}
    columns = varying_columns(gather(read_rows(write(tmp_path / "runs", records))[0]))
    assert "config.runtime.threads" in columns and "config.runtime.profile" not in columns


@pytest.mark.parametrize(
    ("changed", "title"),
    [
        ({"packages": {"python": "3.11.9", "torch": "2.14.0"}}, "torch"),
        ({"threads": 1}, "threads"),
        ({"driver": "999.1"}, "driver"),
        ({"peer_packages": {"python": "3.12.1", "vllm": "0.33.0"}}, "peer's vllm"),
    ],
)
def test_figures_on_other_grounds_are_never_averaged(
    changed: dict[str, Any], title: str, tmp_path: Path
) -> None:
    records = [make_record(block=block, run_id=f"r{block}") for block in range(3)]
    same = {"driver": "999.0", "peer_packages": {"python": "3.12.1", "vllm": "0.32.0"}}
    for record in records:
        record.provenance = record.provenance | same
    records[0].provenance.update(changed)
    cells = gather(read_rows(write(tmp_path / "runs", records))[0])
    assert sorted(len(cell.rows) for cell in cells) == [1, 2]
    assert title in varying_columns(cells).values() and cells[0].label != cells[1].label


def test_every_version_is_told(tmp_path: Path) -> None:
    records = [make_record(block=block, run_id=f"r{block}") for block in range(2)]
    packages = {**records[0].provenance["packages"], "torch": "2.14.0"}
    peers = {"vllm": "0.32.0"}
    records[1].provenance = {**records[1].provenance, "packages": packages, "peer_packages": peers}
    rows = read_rows(write(tmp_path / "runs", records))[0]
    facts = dict(provenance(rows, gather(rows), tmp_path)["facts"])
    assert facts["Packages"].startswith(
        "python 3.11.9, torch 2.13.0 and 2.14.0, bitsandbytes 0.50.2"
    )
    assert facts["Peer's packages"] == "vllm 0.32.0"


def test_of_a_block_that_was_measured_again_the_newest_counts(tmp_path: Path) -> None:
    """With a trace, say. Another host's block is another one, and quality alone adds to the speed
    that is there."""
    old, new, there, alone = (make_record(index=i, run_id=f"{9 - i}run") for i in range(4))
    there.provenance = {**there.provenance, "host": "bench-2"}
    alone.config["task"] = {"_target_": QUALITY_TASK}
    for record in (old, new, there, alone):
        record.cell_id = old.cell_id
    (cell,) = gather(read_rows(write(tmp_path / "runs", [old, new, there, alone]))[0])
    assert [row["run_id"] for row in cell.rows] == ["6run", "7run", "8run"]


def test_markdown_is_one_table_with_escaped_cells(tmp_path: Path) -> None:
    records = [
        make_record(arm=f"a|{i}", cell_id=f"c{i}", run_id=f"r{i}", index=i) for i in range(2)
    ]
    build_report(write(tmp_path / "runs", records), tmp_path / "out")
    lines = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert len(lines) == 4
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
    assert "a\\|0" in lines[2]


def settings(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    plain = {
        "runs": [],
        "runs_dir": str(tmp_path / "runs"),
        "reports_dir": str(tmp_path / "reports"),
        "name": None,
    }
    return plain | changes


def test_a_table_for_a_readme_ends_and_says_where_the_rest_is(
    sweep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = read(sweep).cells
    assert markdown_text(cells).count("\n") == 2 + len(cells) and "further" not in markdown_text(
        cells
    )
    monkeypatch.setattr("minivllm.report.tables.MAX_LINES", 4)
    assert markdown_text(cells).endswith(" |\n\n2 further cells are in table.csv.\n")
    assert markdown_text(cells).count("| ok |") == 4


def test_task_builds_from_paths_names_and_globs(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(settings(tmp_path, runs=[str(sweep)])) == 0
    index = tmp_path / "reports" / sweep.name / "index.html"
    assert str(index) in capsys.readouterr().out and index.is_file()
    assert run(settings(tmp_path, runs=[sweep.name], name="mine")) == 0
    assert (tmp_path / "reports" / "mine" / "index.html").is_file()
    assert find_runs(["*", sweep.name], sweep.parent) == [sweep]
    odd = sweep.parent.rename(sweep.parent.with_name("of[1]"))
    assert (
        find_runs([sweep.name], odd)
        == find_runs(["*"], odd)
        == find_runs([str(odd / sweep.name)], tmp_path)
    )


@pytest.mark.parametrize("runs", [[], ["nowhere"]])
def test_task_refuses_what_is_not_there(sweep: Path, tmp_path: Path, runs: list[str]) -> None:
    with pytest.raises(BadInput, match="runs") as caught:
        run(settings(tmp_path, runs=runs))
    assert "\n" not in str(caught.value)
    if runs:
        assert sweep.name in str(caught.value)  # says what there is
    assert not (tmp_path / "reports").exists()


def test_task_rebuilds_the_table_of_kernels_from_its_record(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example = Path(__file__).parents[2] / "reports" / "examples" / "cpu" / "kernels"
    for name in ("k", "other"):
        (sweep.parent / name).mkdir()
        shutil.copy(example / "kernels.json", sweep.parent / name)
    every = settings(tmp_path, runs=["*"], runs_dir=str(sweep.parent))
    assert run(every) == 0
    reports = tmp_path / "reports"
    assert sorted(path.name for path in reports.iterdir()) == sorted(
        ["index.html", "k", "other", sweep.name]
    )
    assert f"table and plot: {reports / 'k'}\n" in capsys.readouterr().out
    for file in ("kernels.md", "kernels.csv"):
        assert (reports / "k" / file).read_text() == (example / file).read_text()
    assert (reports / "k" / "kernels.png").read_bytes().startswith(b"\x89PNG")
    assert (reports / sweep.name / "index.html").is_file()
    assert run(every | {"runs": ["k"], "name": "mine"}) == 0
    assert (reports / "mine" / "kernels.md").is_file()
    with pytest.raises(BadInput, match="name=both is for one report"):
        run(every | {"name": "both"})


@pytest.mark.parametrize("text", ["{", "[]"])
def test_task_refuses_what_is_no_record_of_kernels(tmp_path: Path, text: str) -> None:
    (tmp_path / "k").mkdir()
    (tmp_path / "k" / "kernels.json").write_text(text)
    with pytest.raises(BadInput, match=r"k/kernels\.json"):
        run(settings(tmp_path, runs=[str(tmp_path / "k")]))


def test_long_names_are_cut() -> None:
    assert joined_name([Path("/x/a"), Path("/x/b")]) == "a+b"
    assert joined_name([Path(f"/x/{'n' * 30}{i}") for i in range(4)]) == "n" * 30 + "0+3-more"
