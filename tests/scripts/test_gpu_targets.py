"""scripts/gpu_targets.py on records that are made up: what a target's figure is, and that the suite
measures it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minivllm.bench.hardware.readings import Roofline
from minivllm.bench.records import storage
from minivllm.bench.records.figures import Metrics, Percentiles, Window
from minivllm.bench.records.identity import digest
from minivllm.bench.records.record import Record
from minivllm.experiments import sweep as sweeping
from minivllm.experiments.plan import Sweep
from minivllm.experiments.schedule import compose_arms
from minivllm.platform import files
from tests.report.synthetic import failed, make_config, make_record
from tests.scripts.gpu_suite import SUITE, suite
from tests.scripts.load import load_script

H200 = "NVIDIA H200"


def record(
    sweep: str,
    arm: str,
    choices: dict[str, str],
    block: int = 0,
    device: str = H200,
    **changes: Any,
) -> Record:
    """One of a sweep on a GPU; the arm's name stands for its identity."""
    made = make_record(
        "fp16", block=block, **{"config": make_config("bf16", "continuous"), **changes}
    )
    made.config["choices"].update(choices)
    made.sweep, made.arm, made.cell_id = sweep, arm, arm
    made.run_id = digest([sweep, arm, block, device])
    made.provenance["device"] = {"name": device, "kind": "cuda"}
    return made


def write(root: Path, made: Record, idle: dict[str, Any] | None = None) -> None:
    folder = root / made.sweep / made.run_id
    storage.write_record(folder, made)
    if idle is not None:
        files.write_json(folder / storage.IDLE, idle)


def collated(root: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, dict[str, list[str]]]:
    """What the script writes, and the cells of each target's row."""
    output = root / "targets.md"
    monkeypatch.setattr(
        sys, "argv", ["gpu_targets.py", "--runs", str(root), "--output", str(output)]
    )
    assert load_script("gpu_targets").main() == 0
    text = output.read_text()
    rows = [
        line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| Qwen3")
    ]
    return text, {row[0]: row[1:] for row in rows}


def one(rows: dict[str, list[str]], *words: str) -> list[str]:
    """The row of the target whose name has these words."""
    (found,) = (row for name, row in rows.items() if all(word in name for word in words))
    return found


def test_the_best_arm_counts_by_the_median_of_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for overlap, values in (("True", (0.75, 0.88, 0.89)), ("False", (0.84, 0.84, 0.99))):
        for block, mbu in enumerate(values):
            arm = f"model=qwen3_8b runtime.overlap={overlap}"
            roofline = Roofline(mbu=mbu)
            write(
                tmp_path, record("gpu-batch1", arm, {"model": "qwen3_8b"}, block, roofline=roofline)
            )
    text, rows = collated(tmp_path, monkeypatch)
    assert text.startswith(f"# Targets on {H200}\n")
    assert one(rows, "8B", "MBU") == [
        *("88.0 %", "75.0 % to 89.0 %", "at least 85.0 %", "undecided"),
        "`gpu-batch1` model=qwen3_8b runtime.overlap=True (3/3 blocks)",
    ]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((0.86, 0.9), ["88.0 %", "86.0 % to 90.0 %", "at least 85.0 %", "met"]),
        ((0.85, 0.85), ["85.0 %", "85.0 % to 85.0 %", "at least 85.0 %", "met"]),
        ((0.83, 0.84), ["83.5 %", "83.0 % to 84.0 %", "at least 85.0 %", "missed"]),
        ((0.84, 0.88), ["86.0 %", "84.0 % to 88.0 %", "at least 85.0 %", "undecided"]),
        ((0.84972, 0.8498), ["84.98 %", "84.97 % to 84.98 %", "at least 85.0 %", "missed"]),
        ((0.850001,), ["85.0001 %", "–", "at least 85.0 %", "met, by one block"]),
        ((0.5,), ["50.0 %", "–", "at least 85.0 %", "missed, by one block"]),
    ],
)
def test_a_verdict_is_that_of_all_blocks(
    values: tuple[float, ...], expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for block, mbu in enumerate(values):
        write(
            tmp_path,
            record("gpu-batch1", "a", {"model": "qwen3_8b"}, block, roofline=Roofline(mbu=mbu)),
        )
    _, rows = collated(tmp_path, monkeypatch)
    assert one(rows, "8B", "MBU")[:4] == expected


def test_a_ratio_is_of_two_arms_and_a_figure_below_the_aim_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for quant, requests, tpots in (
        ("bf16", 1, (9.0, 9.0)),
        ("nf4", 1, (5.9, 6.1)),
        ("bf16", 16, (10.0, 12.0)),
        ("nf4", 16, (8.0, 10.0)),
    ):
        for block, tpot in enumerate(tpots):
            made = record(
                "gpu-8b-precision",
                f"arrival.concurrency={requests} quant={quant}",
                {"model": "qwen3_8b", "quant": quant},
                block,
                metrics=Metrics(tpot_ms=Percentiles(p50=tpot)),
            )
            made.config["arrival"] = {"concurrency": requests}
            write(tmp_path, made)
    _, rows = collated(tmp_path, monkeypatch)
    assert one(rows, "NF4", " 1 at once") == [
        *("1.50×", "1.48× to 1.53×", "at least 2.50×", "missed"),
        "`gpu-8b-precision` arrival.concurrency=1 quant=nf4 (2/2 blocks), over "
        "`gpu-8b-precision` arrival.concurrency=1 quant=bf16 (2/2 blocks)",
    ]
    # Which of two blocks ran beside which is not known: the ends are of the pairs that are furthest
    # apart.
    assert one(rows, "NF4", "16 at once")[:4] == [
        "1.23×",
        "1.00× to 1.50×",
        "at least 1.20×",
        "undecided",
    ]
    # Of two arms one is there.
    assert one(rows, "int8 over bf16, decoding")[:4] == ["not measured", "–", "at least 1.45×", "–"]
    assert one(rows, "int8 over bf16, decoding")[4] == (
        "`gpu-8b-precision`: no record; `gpu-first-batch1`: no record; "
        "`gpu-8b-precision` arrival.concurrency=1 quant=bf16: ok"
    )


def test_the_gap_is_that_of_decoding_steps_of_64_and_the_least_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {"requests": 64, "steps": 64, "span_ms": 99.0, "share": 0.5}
    steps = {"requests": 64, "steps": 62, "span_ms": 95.0, "between": 0.3, "within": 0.2}
    for model, overlap, decoding in (
        ("qwen3_8b", "True", {**steps, "between": 0.011}),
        ("qwen3_8b", "False", {**steps, "between": 0.09, "within": 0.0}),
        ("qwen3", "True", {**steps, "between": 0.001, "requests": 48}),
        ("qwen3", "False", None),
    ):
        made = record("gpu-gap", f"model={model} runtime.overlap={overlap}", {"model": model})
        write(tmp_path, made, {"whole": whole, "decoding": decoding})
    _, rows = collated(tmp_path, monkeypatch)
    assert one(rows, "8B", "gap") == [
        *("1.1 %", "–", "at most 2.0 %", "met, by one block"),
        "`gpu-gap` model=qwen3_8b runtime.overlap=True (1/1 blocks)",
    ]
    assert one(rows, "0.6B", "gap") == [
        *("not measured", "–", "at most 2.0 %", "–"),
        "`gpu-gap` model=qwen3 runtime.overlap=False: ok, without this figure; "
        "`gpu-gap` model=qwen3 runtime.overlap=True: ok, without this figure",
    ]


@pytest.mark.parametrize("told", ["{", "{}", '{"decoding": {"requests": 64, "share": 0.1}}', "[1]"])
def test_a_trace_that_does_not_tell_gives_no_figure(
    told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = record("gpu-gap", "a", {"model": "qwen3"})
    write(tmp_path, made, {})
    (tmp_path / made.sweep / made.run_id / storage.IDLE).write_text(told)
    _, rows = collated(tmp_path, monkeypatch)
    assert one(rows, "0.6B", "gap")[::4] == ["not measured", "`gpu-gap`: ok, without this figure"]


def test_records_that_cannot_be_read_are_said_where_they_would_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a sweep, or some: the other rows are as ever."""
    for torn in ("gpu-8b-prompt/a", "gpu-8b-prompt/b", "gpu-batch1/a"):
        (tmp_path / torn).mkdir(parents=True)
        (tmp_path / torn / storage.RECORD).write_text('{"schema_version": 1, ')
    made = record("gpu-batch1", "model=qwen3_8b", {"model": "qwen3_8b"}, roofline=Roofline(mbu=0.9))
    write(tmp_path, made)
    text, rows = collated(tmp_path, monkeypatch)
    assert text.startswith(f"# Targets on {H200}\n")
    assert one(rows, "MFU") == [
        "not measured",
        "–",
        "at least 55.0 %",
        "–",
        "`gpu-8b-prompt`: 2 not readable",
    ]
    assert one(rows, "8B", "MBU")[::4] == [
        "90.0 %",
        "`gpu-batch1` (1/1 blocks); `gpu-batch1`: 1 not readable",
    ]


def test_what_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    missing = tmp_path / "targets.md"
    monkeypatch.setattr(files, "write_text", full)
    monkeypatch.setattr(
        sys, "argv", ["gpu_targets.py", "--runs", str(tmp_path), "--output", str(missing)]
    )
    assert load_script("gpu_targets").main() == 2
    said = capsys.readouterr()
    assert said.out.startswith("# Targets")  # what was found is not lost
    assert said.err.startswith(f"{missing} cannot be written: ") and said.err.count("\n") == 1


def test_what_failed_is_said_and_is_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arm = "model=qwen3_8b"
    good = record("gpu-8b-prompt", arm, {"model": "qwen3_8b"}, 0, roofline=Roofline(mfu=0.4))
    bad = record("gpu-8b-prompt", arm, {"model": "qwen3_8b"}, 1, roofline=Roofline(mfu=0.9))
    write(tmp_path, failed(bad, "oom", "OutOfMemoryError", "out of memory"))
    _, rows = collated(tmp_path, monkeypatch)
    assert one(rows, "MFU") == ["not measured", "–", "at least 55.0 %", "–", "`gpu-8b-prompt`: oom"]
    write(tmp_path, good)
    _, rows = collated(tmp_path, monkeypatch)
    assert one(rows, "MFU")[::4] == ["40.0 %", "`gpu-8b-prompt` (1/2 blocks)"]


def test_the_newest_code_counts_and_each_device_has_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for code, day, mfu in (("old", "01", 0.9), ("new", "02", 0.6)):
        made = record(
            "gpu-8b-prompt", "baseline", {"model": "qwen3_8b"}, roofline=Roofline(mfu=mfu)
        )
        made.run_id += code
        made.provenance |= {"code_hash": code, "started_at": f"2025-03-{day}T10:00:00+0000"}
        write(tmp_path, made)
    _, rows = collated(tmp_path, monkeypatch)
    assert one(rows, "MFU")[:4] == ["60.0 %", "–", "at least 55.0 %", "met, by one block"]
    other = record("gpu-batch1", "a", {"model": "qwen3"}, device="NVIDIA H100 80GB HBM3")
    write(tmp_path, other)
    text, _ = collated(tmp_path, monkeypatch)
    assert text.count("# Targets on") == 2 and "# Targets on NVIDIA H100 80GB HBM3\n" in text
    assert text.count("| 60.0 % |") == 1


def test_without_a_record_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, rows = collated(tmp_path, monkeypatch)
    script = load_script("gpu_targets")
    assert len(rows) == len(script.TARGETS) and {row[0] for row in rows.values()} == {
        script.MISSING
    }
    assert "a device that no record names" in text and "No record has measured limits." in text


def test_every_sweep_of_a_target_is_the_suites() -> None:
    named = {sweep for target in load_script("gpu_targets").TARGETS for sweep in target.sweeps()}
    assert named and all(f" {name} " in SUITE.read_text() for name in named)


def test_the_suite_measures_every_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Callable[..., Any]
) -> None:
    """Each arm that it plans gets a record: then no target is without a figure."""
    planned: list[dict[str, Any]] = []

    def note(sweep: Sweep, load: Any, launch: Any) -> int:
        for cell in compose_arms(sweep, load):
            assert cell.config is not None, cell.problem
            planned.append({"arm": cell.arm.name, **cell.config})
        return 0

    monkeypatch.setattr(sweeping, "run_sweep", note)
    trace = tmp_path / "azure.csv"
    trace.touch()
    parts = ("table", "precision", "activations", "batching", "peer")
    _, commands = suite(tmp_path, *parts, AZURE_TRACE=str(trace))
    for _, *words in commands:
        assert cli(*words).code == 0
    # Each arm has figures of its own, so that a target which reads another, or divides the wrong
    # way round, shows.
    decoding = {"requests": 64, "steps": 61, "span_ms": 99.0, "between": 0.015, "within": 0.2}
    per_s = {
        ("gpu-8b-batching", "continuous"): 1600.0,
        ("gpu-8b-batching", "static"): 1000.0,
        ("gpu-8b-batching-azure", "continuous"): 2100.0,
        ("gpu-8b-batching-azure", "static"): 700.0,
        ("gpu-256-requests", "minivllm"): 5000.0,
        ("gpu-256-requests", "transformers_continuous"): 800.0,
    }
    tpots = {
        ("bf16", 1): 9.0,
        ("int8", 1): 6.0,
        ("nf4", 1): 4.5,
        ("bf16", 16): 10.0,
        ("nf4", 16): 8.0,
    }
    for config in planned:
        sweep, choices = config["sweep"]["name"], config["choices"]
        speed = (
            per_s.get((sweep, choices["batching"])) or per_s.get((sweep, choices["engine"])) or 1.0
        )
        at_once = config["arrival"].get("concurrency")
        small, ours = choices["model"] == "qwen3", choices["engine"] == "minivllm"
        tpot = 2.0 if small else 8.0
        if sweep == "gpu-8b-precision":
            tpot = tpots.get((choices["quant"], at_once), 7.0)
        figures = Metrics(
            tpot_ms=Percentiles(p50=tpot),
            ttft_ms=Percentiles(p50=700.0 if choices["quant"] == "bf16" else 500.0),
            output_tokens_per_s=speed if sweep == "gpu-256-requests" else 1.0,
            steady=Window(output_tokens_per_s=speed if "batching" in sweep else 1.0),
        )
        roofline = Roofline(
            bandwidth_bytes_per_s=4.3e12,
            matrix_flops_per_s=8e14,
            matrix_dtype="bfloat16",
            mbu=0.1 if "triton" in sweep else 0.95 if small else 0.85,
            mfu=0.6 if sweep == "gpu-8b-prompt" else 0.7,
            share=0.75 if sweep == "gpu-256-requests" and ours else 0.8,
        )
        for block in range(config["measure"]["repeats"]):
            made = record(
                sweep, config["arm"], {}, block, config=config, metrics=figures, roofline=roofline
            )
            trace = (
                {"whole": decoding, "decoding": decoding} if config["runtime"]["profile"] else None
            )
            write(tmp_path / "runs", made, trace)
    text, rows = collated(tmp_path / "runs", monkeypatch)
    assert len(rows) == len(load_script("gpu_targets").TARGETS) and "not measured" not in text
    assert "by one block" not in text  # no verdict rests on a single one
    assert "\nMeasured limits: products of bfloat16 at 800 TFLOP/s, reading at 4.30 TB/s.\n" in text
    assert {name: row[0] for name, row in rows.items()} == {
        "Qwen3-8B, one request: bandwidth used (MBU)": "85.0 %",
        "Qwen3-0.6B, one request: bandwidth used (MBU)": "95.0 %",
        "Qwen3-0.6B, 256 requests: share of the run that the limits allow": "75.0 %",
        "Qwen3-0.6B, 256 requests: output tokens/s over transformers' continuous batching "
        "(sdpa, without CUDA graphs, not asynchronous)": "6.25×",
        "Qwen3-8B, a prompt of 8,192 tokens: matrix rate used (MFU)": "60.0 %",
        "Qwen3-8B, a prompt of 8,192 tokens: int8 with 8-bit activations over bf16": "1.40×",
        "Qwen3-8B, 1 at once: NF4 over bf16, decoding": "2.00×",
        "Qwen3-8B, 16 at once: NF4 over bf16, decoding": "1.25×",
        "Qwen3-8B, 1 at once: int8 over bf16, decoding": "1.50×",
        "Qwen3-8B, 64 at once, lengths of 100 to 1,024: continuous over static batching": "1.60×",
        "Qwen3-8B, 64 at once, lengths of Azure's conversations: continuous over "
        "static batching": "3.00×",
        "Qwen3-8B, 64 at once: gap between decoding steps, of the step (traced: an upper "
        "bound)": "1.5 %",
        "Qwen3-0.6B, 64 at once: gap between decoding steps, of the step (traced: an upper "
        "bound)": "1.5 %",
    }
    beside = [config for config in planned if config["sweep"]["name"] == "gpu-256-requests"]
    assert [config["choices"]["engine"] for config in beside] == ["minivllm"] * 2 + [
        "transformers_continuous"
    ]
    for same in ("workload", "arrival", "model", "measure"):  # warm-up and repeats too
        assert all(config[same] == beside[0][same] for config in beside)
    assert beside[0]["measure"]["warmup_requests"] == "auto"
