"""What the page and table.csv say: true to the records, whatever the records are."""

from __future__ import annotations

import copy
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from minivllm.analysis.cells import gather
from minivllm.analysis.liveness import Liveness
from minivllm.analysis.rows import differing, distinct, read_rows
from minivllm.bench.metrics.glossary import glossary
from minivllm.bench.records.figures import Percentiles
from minivllm.bench.records.record import Validity
from minivllm.bench.records.storage import write_record
from minivllm.errors import BadInput
from minivllm.experiments.ending import conclude
from minivllm.report.inputs import read
from minivllm.report.sections import MOST_KNOBS, commands, liveness, validity
from tests.report.pagereader import Page, build, build_report, table
from tests.report.synthetic import failed, make_record, make_sweep, write

pytestmark = pytest.mark.usefixtures("without_figures")


def test_numbers_are_means_and_ranges_of_the_ok_blocks(sweep: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    build_report(sweep, out)
    rows = table(out)
    assert len(rows) == 6
    values = [
        make_record("int8", "continuous", block, 3).metrics.output_tokens_per_s
        for block in range(3)
    ]
    row = rows["int8 · continuous"]
    key = "metrics.output_tokens_per_s"
    assert float(row[key]) == pytest.approx(math.fsum(v or 0 for v in values) / 3)
    assert float(row[f"{key}.min"]) == min(v or 0 for v in values)
    assert float(row[f"{key}.max"]) == max(v or 0 for v in values)
    assert (row["quant"], row["batching"], row["blocks"], row["blocks_ok"]) == (
        "int8",
        "continuous",
        "3",
        "3",
    )
    assert float(row["memory.weights"]) == 0.75e9
    assert row["metrics.ttft_ms.p99"] == ""  # 48 requests have no 99th percentile
    lost = rows["nf4 · continuous"]
    assert (lost["status"], lost["blocks_ok"], lost[key], lost["error.type"]) == (
        "oom",
        "0",
        "",
        "MemoryError",
    )


def test_verdict_comes_first_and_says_what_the_records_say(sweep: Path, tmp_path: Path) -> None:
    text = Page(build_report(sweep, tmp_path / "out")).text
    assert text.index(
        "Fastest: int8 · continuous at 76.6 output tokens/s, 6.89× the slowest"
    ) < text.index("Results")
    assert "Over 3 blocks the fastest had 75.7 to 77.6 tokens/s" in text
    assert "1 of 6 cells had failures: nf4 · continuous (oom)" in text
    assert "Random weights." in text
    assert "J/token: no RAPL counter is readable" in text
    assert "no interval" not in text


def test_one_block_says_that_there_is_no_interval(tmp_path: Path) -> None:
    page, _ = build(tmp_path, make_sweep(blocks=1))
    assert "measured once, so there is no interval" in page.text
    assert "Over 1 block" not in page.text


def test_overlapping_ranges_are_not_called_a_winner(tmp_path: Path) -> None:
    records = []
    for arm, figures in (("a", (10.0, 12.0)), ("b", (11.0, 11.5))):
        for block, figure in enumerate(figures):
            record = make_record(block=block, arm=arm, cell_id=arm, run_id=f"{arm}{block}")
            record.metrics.output_tokens_per_s = figure
            records.append(record)
    page, _ = build(tmp_path, records)
    assert (
        "Not separated: b and a, the fastest two, whose "
        "difference is within the scatter of their blocks." in page.text
    )


def test_different_workloads_get_no_ratio(tmp_path: Path) -> None:
    first, second = (
        make_record("fp16", "sequential"),
        make_record("nf4", "sequential", index=1, workload_hash="other"),
    )
    page, _ = build(tmp_path, [first, second])
    assert "different workloads, so no ratio" in page.text
    assert "the slowest" not in page.text


def test_different_rates_get_no_ratio(tmp_path: Path) -> None:
    """More requests a second are more tokens a second; no engine became faster."""
    records = [
        make_record("fp16", "sequential", cell_id="a"),
        make_record("nf4", "sequential", index=1),
    ]
    for rate, record in enumerate(records, 1):
        record.config["choices"]["arrival"] = "poisson"
        record.config["arrival"] = {"rate": float(rate)}
    page, _ = build(tmp_path / "apart", records)
    assert "Requests arrived at different rates" in page.text and "the slowest" not in page.text
    records[0].config["arrival"] = {"rate": 2.0}
    page, _ = build(tmp_path / "alike", records)
    assert "at different rates" not in page.text
    # 0.2 of the 2 requests a second were served: what came faster than it was served caps nothing.
    assert "Fastest: " in page.text and "No cell kept up with the pace of its requests" in page.text
    for record in records:
        record.metrics.ttft_ms.mean = record.metrics.queue_ms.mean = 10.0  # nobody waits
    page, _ = build(tmp_path / "kept_up", records)
    assert "Lowest E2E p50:" in page.text and "the load sets the throughput" in page.text


def test_the_first_cell_as_the_fastest_is_said_plainly(tmp_path: Path) -> None:
    page, _ = build(
        tmp_path, [make_record("int8", "continuous"), make_record("int8", "sequential", index=1)]
    )
    assert "nothing that was varied made it faster" in page.text


def test_an_arm_that_could_not_be_composed_does_not_disturb_the_others(tmp_path: Path) -> None:
    broken = failed(
        make_record(arm="typo", cell_id="", run_id="typo"),
        "invalid",
        "BadInput",
        "no option nf5",
        "",
    )
    broken.config = {}
    page, out = build(tmp_path, [make_record("fp16"), make_record("int8", index=1), broken])
    rows = table(out)
    assert set(rows) == {"fp16", "int8", "typo"}
    header = (out / "table.csv").read_text().splitlines()[0].split(",")
    assert header[: header.index("status")] == ["label", "sweep", "arm", "cell_id", "quant"]
    assert "no option nf5" in page.text


def test_a_record_that_failed_its_validity_gate_is_not_quoted(tmp_path: Path) -> None:
    bad = make_record("nf4", "sequential", index=1, validity=Validity(False, ["MBU above 100 %"]))
    page, out = build(tmp_path, [make_record("fp16", "sequential"), bad])
    row = table(out)["nf4"]
    assert (row["status"], row["metrics.output_tokens_per_s"]) == ("invalid", "")
    assert "not valid MBU above 100 %" in page.text


def test_some_blocks_failed(tmp_path: Path) -> None:
    records = [make_record(block=block, run_id=f"r{block}") for block in range(3)]
    failed(records[1], "timeout", "Timeout", "took longer than 1800 s").provenance = {}
    page, out = build(tmp_path, records)
    rows = list(table(out).values())
    assert len(rows) == 1  # the failed block knows neither device nor code, yet belongs to its cell
    assert (rows[0]["status"], rows[0]["blocks"], rows[0]["blocks_ok"]) == ("ok", "3", "2")
    assert "2 ok, 1 timeout" in page.text


def test_records_of_different_code_are_never_averaged(tmp_path: Path) -> None:
    old, new = make_record(run_id="old"), make_record(run_id="new", block=1)
    new.provenance = {**new.provenance, "code_hash": "beef"}
    _, out = build(tmp_path, [old, new])
    assert [row["code"] for row in table(out).values()] == ["c0de", "beef"]


def test_a_knob_that_did_nothing_is_flagged(tmp_path: Path) -> None:
    base, arm = make_record("fp16", "sequential"), make_record("int8", "sequential", index=1)
    arm.liveness = copy.deepcopy(base.liveness)
    page, _ = build(tmp_path, [base, arm])
    assert "Not live, so not a result: quant=int8 in int8" in page.text
    arm.liveness["quant"]["layers_quantised"] = 196
    page, _ = build(tmp_path, [base, arm])
    assert "Not live" not in page.text


def test_a_knob_that_did_nothing_in_several_cells_is_named_once(tmp_path: Path) -> None:
    base = make_record("fp16", "sequential")
    arms = [make_record("int8", name, index=i) for i, name in enumerate(("static", "dynamic"), 1)]
    for arm in arms:
        arm.liveness = copy.deepcopy(base.liveness)
    page, _ = build(tmp_path, [base, *arms])
    assert "Not live, so not a result: quant=int8 in 2 cells" in page.text


def test_notes_that_differ_in_numbers_alone_are_one(tmp_path: Path) -> None:
    notes = (
        ["the window lasted 0.07 s: short", "1,024 of 2,048 tokens (r7)"],
        ["the window lasted 0.16 s: short", "8 of 2,048 tokens (r7)", "8 of 2,048 tokens (r8)"],
    )
    records = [make_record(name) for name in ("fp16", "int8")]
    for record, found in zip(records, notes, strict=True):
        record.validity = Validity(ok=True, notes=found)
    cells = gather(read_rows(write(tmp_path, records))[0])
    assert [item["text"] for item in validity(cells) if item["kind"] == "note"] == [
        "the window lasted 0.07 to 0.16 s: short",
        "8 to 1,024 of 2,048 tokens (r7)",
        "8 of 2,048 tokens (r8)",
    ]


def test_many_live_knobs_are_folded_and_dead_ones_are_not(tmp_path: Path) -> None:
    cells = gather(read_rows(write(tmp_path, [make_record()]))[0])
    found = [Liveness(f"c{i}", "quant=int8", {}, {}, "live") for i in range(MOST_KNOBS)]
    shown = liveness(cells, found)
    assert shown is not None and (len(shown["knobs"]), shown["folded"]) == (MOST_KNOBS, [])
    dead = Liveness("x", "quant=int4", {}, {}, "not live")
    shown = liveness(cells, [*found, dead])
    assert shown is not None and (shown["knobs"], shown["folded"]) == ([dead], found)
    page, _ = build(tmp_path / "page", [make_record()])
    assert "Every other knob" not in page.text


def test_swept_numbers_are_columns_and_implied_knobs_are_not(tmp_path: Path) -> None:
    records = []
    for index, size in enumerate((16, 32)):
        record = make_record(
            cell_id=f"c{size}", arm=f"cache.block_size={size}", run_id=f"r{size}", index=index
        )
        record.config["cache"]["block_size"] = size
        records.append(record)
    _, out = build(tmp_path, records)
    assert set(table(out)) == {"block_size=16", "block_size=32"}


def test_a_knob_that_is_null_is_told_from_one_that_is_not_there(tmp_path: Path) -> None:
    records = []
    for index, blocks in enumerate((None, 3, "no such knob")):
        record = make_record(cell_id=f"c{index}", run_id=f"r{index}", index=index)
        if index < 2:
            record.config["cache"]["num_blocks"] = blocks
        records.append(record)
    out = tmp_path / "out"
    page = Page(build_report(write(tmp_path / "runs", records), out))
    names = [line.split(" | ")[0] for line in (out / "table.md").read_text().splitlines()[2:]]
    assert names == ["| null", "| 3", "| –"]
    assert "cache.num_blocks = null, 3, –" in page.text and "Fastest: num_blocks=3 at" in page.text
    assert "cache.num_blocks null" in " ".join(page.text.split())  # in the list of every knob


BUSY = "other processes used 98 % of a core on average during the window"


def test_a_busy_machine_is_told_with_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    met = make_record("fp16", validity=Validity(True, [], [BUSY]))
    for name, second, who in (
        ("one", make_record("nf4", index=1), "fp16 was"),
        (
            "both",
            make_record("nf4", index=1, validity=Validity(True, [], [BUSY])),
            "every cell was",
        ),
    ):
        folder = write(tmp_path / name, [met, second])
        assert conclude(folder, tmp_path / name / "out", {})
        message = f"Other processes used the machine while {who} measured"
        assert message in capsys.readouterr().out
        assert message in Page(tmp_path / name / "out" / "index.html").text
    quiet = write(tmp_path / "quiet", [make_record("fp16"), make_record("nf4", index=1)])
    assert "Other processes" not in Page(build_report(quiet, tmp_path / "quiet" / "out")).text


@pytest.mark.parametrize(
    ("kind", "threads", "advice"),
    [
        ("cpu", 4, "its 4 threads wait for one that has no core: runtime.threads=3 leaves one."),
        ("cpu", 1, None),
        ("gpu", 4, None),
    ],
)
def test_threads_on_a_busy_cpu_are_told_what_to_do(
    tmp_path: Path, kind: str, threads: int, advice: str | None
) -> None:
    record = make_record("fp16", validity=Validity(True, [], [BUSY]))
    record.provenance |= {"threads": threads, "device": {"name": "X", "kind": kind}}
    text = Page(build_report(write(tmp_path / "runs", [record]), tmp_path / "out")).text
    assert "Other processes used the machine while this was measured: figures may be worse" in text
    assert advice in text if advice else "runtime.threads=" not in text


def test_a_row_that_was_not_alone_is_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the page, in the terminal and in the table for a README."""
    met = make_record("fp16", validity=Validity(True, [], [BUSY]))
    folder = write(tmp_path / "runs", [met, make_record("nf4", index=1)])
    assert conclude(folder, tmp_path / "out", {})
    (marked,) = (line for line in capsys.readouterr().out.splitlines() if "ok, busy" in line)
    assert marked.split()[0] == "fp16"
    page = Page(tmp_path / "out" / "index.html")
    assert (
        "fp16 ok, busy" in page.text
        and "busy : other processes used the machine meanwhile" in page.text
    )
    assert page.text.count("ok, busy") == 2  # the row, and the record
    assert (tmp_path / "out" / "table.md").read_text().count("| fp16 | ok, busy |") == 1
    assert [row["status"] for row in table(tmp_path / "out").values()] == [
        "ok",
        "ok",
    ]  # for scripts: as in the records


def test_what_each_request_was_is_told_where_all_are_alike(tmp_path: Path) -> None:
    for last, message in (
        (32, "2 requests of 64 tokens in and 32 out"),
        (31, "2 requests, 128 tokens in and"),
    ):
        record = make_record()
        record.metrics.num_requests, record.metrics.input_tokens = 2, 128
        requests = [{"input_tokens": 64, "output_tokens": tokens} for tokens in (32, last)]
        write_record(tmp_path / str(last) / "s" / "r", record, requests=requests)
        page = Page(build_report(tmp_path / str(last), tmp_path / str(last) / "out"))
        assert message in page.text
    assert (
        "tokens in and 3,072 out in total" in build(tmp_path / "unknown", [make_record()])[0].text
    )


def test_the_length_of_the_window_is_in_the_table(tmp_path: Path) -> None:
    record = make_record()
    record.metrics.duration_s = 12.34
    page, _ = build(tmp_path, [record])
    assert "Window s" in page.text and " 12.3 " in page.text


def test_bandwidth_is_not_told_of_what_lies_in_the_cache(tmp_path: Path) -> None:
    """Such a share of it says nothing about memory."""
    records = [make_record("fp16"), make_record("nf4", index=1)]
    records[1].roofline = replace(records[1].roofline, mbu=0.334, fits_cache=True)
    page, out = build(tmp_path / "one", records)
    reason = "the streamed bytes fit the last-level cache, so it would say nothing about memory"
    assert (
        "33.4" not in page.text
        and "31.0" in page.text
        and f"MBU, where it is not shown: {reason}" in page.text
    )
    assert reason in page.attributes("td", "title")
    # what was recorded is in the file of all fields
    assert table(out)["nf4"]["roofline.mbu"] == "0.334"
    page, _ = build(tmp_path / "all", records[1:])
    assert "MBU %" not in page.text and reason in page.text


def test_a_failure_is_told_once(tmp_path: Path) -> None:
    broken = failed(make_record("nf4", index=1), "oom", "OutOfMemory", "no room for the pool")
    broken.validity = Validity(False, ["oom: no room for the pool"])
    doubted = make_record(
        "int8", index=2, status="invalid", validity=Validity(False, ["lost tokens"])
    )
    page = Page(
        build_report(
            write(tmp_path / "runs", [make_record("fp16"), broken, doubted]), tmp_path / "out"
        )
    )
    assert "no room for the pool" in page.text and "oom: no room" not in page.text
    assert "not valid lost tokens (int8)" in " ".join(page.text.split())


def test_blocks_that_read_the_same_are_no_range(tmp_path: Path) -> None:
    records = []
    for quant in ("fp16", "nf4"):
        for block in (0, 1):
            record = make_record(quant, block=block)
            record.metrics.output_tokens_per_s = {"fp16": 10.0, "nf4": 20.0 + block / 1000}[quant]
            records.append(record)
    page = Page(build_report(write(tmp_path / "runs", records), tmp_path / "out"))
    assert "Over 2 blocks the fastest had 20.0 tokens/s, block by block" in page.text
    for record in records:  # one cell after the other
        hour = {"fp16": 10, "nf4": 12}[record.config["choices"]["quant"]]
        record.provenance["started_at"] = f"2025-03-04T{hour}:{record.block:02d}:07+0000"
    apart = Page(build_report(write(tmp_path / "apart", records), tmp_path / "out"))
    assert "Over 2 blocks the fastest had 20.0 tokens/s; these are" in apart.text


def test_what_is_not_known_of_a_cell_is_not_in_its_name(tmp_path: Path) -> None:
    records = [
        make_record(q, run_id=q, attention_backend=kernel)
        for q, kernel in (("fp16", "sdpa"), ("int8", "cpu"), ("nf4", None))
    ]
    out = tmp_path / "out"
    build_report(write(tmp_path / "runs", records), out)
    labels = [line.split(",")[0] for line in (out / "table.csv").read_text().splitlines()[1:]]
    assert labels == ["fp16 · sdpa", "int8 · cpu", "nf4"]
    assert "| nf4 | – | ok |" in (out / "table.md").read_text()


def test_what_cannot_be_read_is_named(sweep: Path, tmp_path: Path) -> None:
    for path in sweep.glob("*/steps.parquet"):
        shutil.copy(path, path.with_name("requests.parquet"))
    assert read(sweep).warning is None
    first, second, third, *_ = sorted(path.parent for path in sweep.glob("*/steps.parquet"))
    broken = [
        first / "record.json",
        second / "requests.parquet",
        third / "steps.parquet",
        third / "telemetry.parquet",
    ]
    broken[0].write_text("{")
    broken[1].write_bytes(b"garbage")
    broken[2].unlink()
    broken[3].write_bytes(broken[3].read_bytes()[:-8])
    assert read(sweep).warning == (
        "1 unreadable record left out, 3 tables missing or torn: the report names them under "
        "Validity"
    )
    text = Page(build_report(sweep, tmp_path / "out")).text
    assert all(str(path) in text for path in broken)


def test_percentiles_that_exist_are_shown(tmp_path: Path) -> None:
    record = make_record()
    record.metrics.ttft_ms = Percentiles(200.0, 150.0, 300.0, 350.0, 987.0, 128)
    page, _ = build(tmp_path, [record])
    assert "TTFT p99" in page.text and "987" in page.text


def test_a_failing_write_leaves_the_old_page(
    sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    index = build_report(sweep, out)
    before = index.read_bytes()

    def full_disk(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full_disk)
    with pytest.raises(OSError, match="No space"):
        build_report(sweep, out)
    assert index.read_bytes() == before
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


def test_several_runs_are_one_report(tmp_path: Path) -> None:
    first = write(tmp_path / "runs", [make_record(sweep="monday")])
    second = write(tmp_path / "runs", [make_record(sweep="tuesday", run_id="other")])
    out = tmp_path / "out"
    page = Page(build_report([first, second], out))
    assert set(table(out)) == {"monday", "tuesday"}
    assert "monday + tuesday" in page.text


def test_no_records_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match="no record"):
        build_report(tmp_path / "empty", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_glossary_comes_from_the_metric_classes(sweep: Path, tmp_path: Path) -> None:
    text = Page(build_report(sweep, tmp_path / "out")).text
    for entry in glossary():
        assert entry.name in text and entry.description[:40] in text
    assert text.rindex("Glossary") < text.rindex("Every metric: ")
    assert "`" not in text and "None" not in text.split("Glossary")[-1]


def test_a_knob_is_judged_by_its_own_counter(tmp_path: Path) -> None:
    """Prefix caching that looked prefixes up and found none has done nothing, though a counter
    moved."""
    base, arm = make_record("fp16", "sequential"), make_record("fp16", "sequential", index=1)
    arm.run_id, arm.cell_id, arm.arm = "b", "another", "cached"
    for record, caching in ((base, False), (arm, True)):
        record.config["cache"]["prefix_caching"] = caching
        record.liveness["cache"] = {
            "prefix_tokens_looked_up": 900.0 * caching,
            "prefix_tokens_reused": 0.0,
        }
    page, _ = build(tmp_path, [base, arm])
    assert "Not live, so not a result: cache.prefix_caching=true" in page.text
    arm.liveness["cache"]["prefix_tokens_reused"] = 512.0
    page, _ = build(tmp_path, [base, arm])
    assert "Not live" not in page.text


@pytest.mark.parametrize(
    ("recorded", "shown"),
    [
        ("python run.py -m quant=bf16,int8", "python -m minivllm -m quant=bf16,int8"),
        ("python3.11 /opt/bin/minivllm preset=tune", "python -m minivllm preset=tune"),
        ("python -m minivllm 'runs=[a, b]'", "python -m minivllm 'runs=[a, b]'"),
        ("/opt/bin/minivllm task=quality", "python -m minivllm task=quality"),
        ("python run.py runs_dir= reports_dir= quant=nf4", "python -m minivllm quant=nf4"),
        ("python study.py --fast", "python study.py --fast"),
        ("an 'open quote", "an 'open quote"),
    ],
)
def test_the_command_that_is_shown_runs(recorded: str, shown: str) -> None:
    assert commands([{"provenance.command": recorded}]) == [shown]


def test_runs_keep_the_order_in_which_they_are_given(tmp_path: Path) -> None:
    for name in ("a-after", "z-before"):
        write(tmp_path / "runs", [make_record(sweep=name, run_id=name)], parquet=False)
    folders = [tmp_path / "runs" / name for name in ("z-before", "a-after")]
    for given in (folders, folders[::-1]):
        build_report(given, tmp_path / "out")
        assert [row["sweep"] for row in table(tmp_path / "out").values()] == [
            folder.name for folder in given
        ]


def test_a_table_that_ends_says_where_the_rest_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six cells of three blocks where a table may have four rows."""
    for module in ("sections", "results", "provenance"):
        monkeypatch.setattr(f"minivllm.report.{module}.MAX_ROWS", 4)
    page, out = build(tmp_path, make_sweep(), parquet=False)
    assert "2 further rows are in table.csv." in page.text and len(table(out)) == 6
    assert "14 further records are in records.csv" in page.text and "Every record (18)" in page.text
    lines = (out / "records.csv").read_text().splitlines()
    assert len(lines) == 19 and lines[0].startswith(
        "label,run_id,block,status,metrics.output_tokens_per_s"
    )
    links = {link for link in page.attributes("a", "href") if link.startswith("#records-")}
    assert links == {f"#records-{n}" for n in range(1, 5)}
    monkeypatch.undo()
    build(tmp_path / "whole", make_sweep(), parquet=False)
    assert not (tmp_path / "whole" / "reports" / "r" / "records.csv").exists()


def test_fields_that_differ_are_found_whatever_fields_there_are() -> None:
    rows: list[dict[str, object]] = [
        {"a": 1, "b": [1]},
        {"a": 1, "b": [1]},
        {"b": [2], "a": 1, "c": None},
    ]
    assert differing(rows) == {"b", "c"} and differing(rows[:2]) == set() == differing(rows[:1])
    assert distinct(rows, "b") == [[1], [2]] and distinct(rows, "a") == [1]
