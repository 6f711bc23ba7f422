"""scripts/gpu_targets.py on records that are made up: what a target's figure is, and that the suite measures it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minivllm.ablation import sweep as sweeping
from minivllm.ablation.plan import Sweep
from minivllm.ablation.schedule import compose_arms
from minivllm.bench import storage
from minivllm.bench.identity import digest
from minivllm.bench.record import Metrics, Percentiles, Record, Roofline, Window
from tests.report.synthetic import failed, make_config, make_record
from tests.scripts import load_script
from tests.test_gpu_suite import suite

H200 = "NVIDIA H200"


def record(
    sweep: str, arm: str, choices: dict[str, str], block: int = 0, device: str = H200, **changes: Any
) -> Record:
    """One of a sweep on a GPU; the arm's name stands for its identity."""
    made = make_record("fp16", block=block, **{"config": make_config("bf16", "continuous"), **changes})
    made.config["choices"].update(choices)
    made.sweep, made.arm, made.cell_id = sweep, arm, arm
    made.run_id = digest([sweep, arm, block, device])
    made.provenance["device"] = {"name": device, "kind": "cuda"}
    return made


def write(root: Path, made: Record, idle: dict[str, Any] | None = None) -> None:
    folder = root / made.sweep / made.run_id
    storage.write_record(folder, made)
    if idle is not None:
        storage.write_json(folder / storage.IDLE, idle)


def collated(root: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, dict[str, list[str]]]:
    """What the script writes, and the cells of each target's row."""
    output = root / "targets.md"
    monkeypatch.setattr(sys, "argv", ["gpu_targets.py", "--runs", str(root), "--output", str(output)])
    load_script("gpu_targets").main()
    text = output.read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| Qwen3")]
    return text, {row[0]: row[1:] for row in rows}


def one(rows: dict[str, list[str]], *words: str) -> list[str]:
    """The row of the target whose name has these words."""
    (found,) = (row for name, row in rows.items() if all(word in name for word in words))
    return found


def test_the_best_arm_counts_by_the_median_of_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for overlap, values in (("True", (0.70, 0.83, 0.84)), ("False", (0.79, 0.79, 0.99))):
        for block, mbu in enumerate(values):
            arm = f"model=qwen3_8b runtime.overlap={overlap}"
            roofline = Roofline(mbu=mbu)
            write(tmp_path, record("gpu-batch1", arm, {"model": "qwen3_8b"}, block, roofline=roofline))
    text, rows = collated(tmp_path, monkeypatch)
    assert text.startswith(f"# Targets on {H200}\n")
    assert one(rows, "MBU") == [
        *("83.0 %", "at least 80.0 %", "met"),
        "`gpu-batch1` model=qwen3_8b runtime.overlap=True (3/3 blocks)",
    ]


def test_a_ratio_is_of_two_arms_and_a_figure_below_the_aim_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for quant, requests, tpot in (("bf16", 1, 9.0), ("nf4", 1, 6.0), ("bf16", 16, 10.0), ("nf4", 16, 8.0)):
        made = record(
            "gpu-8b-precision",
            f"arrival.concurrency={requests} quant={quant}",
            {"model": "qwen3_8b", "quant": quant},
            metrics=Metrics(tpot_ms=Percentiles(p50=tpot)),
        )
        made.config["arrival"] = {"concurrency": requests}
        write(tmp_path, made)
    _, rows = collated(tmp_path, monkeypatch)
    assert one(rows, "NF4", " 1 at once") == [
        *("1.50×", "at least 1.80×", "missed"),
        "`gpu-8b-precision` arrival.concurrency=1 quant=nf4 (1/1 blocks), over "
        "`gpu-8b-precision` arrival.concurrency=1 quant=bf16 (1/1 blocks)",
    ]
    assert one(rows, "NF4", "16 at once")[:3] == ["1.25×", "at least 1.20×", "met"]
    # Of two arms one is there.
    assert one(rows, "int8")[:3] == ["not measured", "at least 1.45×", "–"]
    assert one(rows, "int8")[3] == (
        "`gpu-8b-precision`: no record; `gpu-8b-precision` arrival.concurrency=1 quant=bf16: ok"
    )


def test_idleness_is_that_of_the_decoding_steps_of_64_and_the_least_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {"requests": 64, "steps": 64, "span_ms": 99.0, "share": 0.5}
    for model, overlap, decoding in (
        ("qwen3_8b", "True", {**whole, "share": 0.011}),
        ("qwen3_8b", "False", {**whole, "share": 0.09}),
        ("qwen3", "True", {**whole, "share": 0.001, "requests": 48}),
        ("qwen3", "False", None),
    ):
        made = record("gpu-gap", f"model={model} runtime.overlap={overlap}", {"model": model})
        write(tmp_path, made, {"whole": whole, "decoding": decoding})
    _, rows = collated(tmp_path, monkeypatch)
    assert one(rows, "8B", "idles") == [
        *("1.1 %", "at most 2.0 %", "met"),
        "`gpu-gap` model=qwen3_8b runtime.overlap=True (1/1 blocks)",
    ]
    assert one(rows, "0.6B", "idles")[:3] == ["not measured", "at most 2.0 %", "–"]


def test_what_failed_is_said_and_is_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arm = "model=qwen3_8b"
    good = record("gpu-8b-prompt", arm, {"model": "qwen3_8b"}, 0, roofline=Roofline(mfu=0.4))
    bad = record("gpu-8b-prompt", arm, {"model": "qwen3_8b"}, 1, roofline=Roofline(mfu=0.9))
    write(tmp_path, failed(bad, "oom", "OutOfMemoryError", "out of memory"))
    _, rows = collated(tmp_path, monkeypatch)
    assert one(rows, "MFU") == [
        "not measured",
        "at least 55.0 %",
        "–",
        "`gpu-8b-prompt`: oom",
    ]
    write(tmp_path, good)
    _, rows = collated(tmp_path, monkeypatch)
    assert one(rows, "MFU")[::3] == ["40.0 %", "`gpu-8b-prompt` (1/2 blocks)"]


def test_the_newest_code_counts_and_each_device_has_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for code, day, mfu in (("old", "01", 0.9), ("new", "02", 0.6)):
        made = record("gpu-8b-prompt", "baseline", {"model": "qwen3_8b"}, roofline=Roofline(mfu=mfu))
        made.run_id += code
        made.provenance |= {"code_hash": code, "started_at": f"2025-03-{day}T10:00:00+0000"}
        write(tmp_path, made)
    _, rows = collated(tmp_path, monkeypatch)
    assert one(rows, "MFU")[:3] == ["60.0 %", "at least 55.0 %", "met"]
    other = record("gpu-batch1", "a", {"model": "qwen3"}, device="NVIDIA H100 80GB HBM3")
    write(tmp_path, other)
    text, _ = collated(tmp_path, monkeypatch)
    assert text.count("# Targets on") == 2 and "# Targets on NVIDIA H100 80GB HBM3\n" in text
    assert text.count("| 60.0 % |") == 1


def test_without_a_record_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, rows = collated(tmp_path, monkeypatch)
    script = load_script("gpu_targets")
    assert len(rows) == len(script.TARGETS) and {row[0] for row in rows.values()} == {script.MISSING}
    assert "a device that no record names" in text


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
    _, commands = suite(tmp_path, "table", "precision", "batching", "peer", AZURE_TRACE=str(trace))
    for _, *words in commands:
        assert cli(*words).code == 0
    figures = Metrics(
        tpot_ms=Percentiles(p50=5.0), output_tokens_per_s=9.0, steady=Window(output_tokens_per_s=9.0)
    )
    idle = {"requests": 64, "steps": 61, "span_ms": 99.0, "share": 0.5}
    for config in planned:
        made = record(config["sweep"]["name"], config["arm"], {}, config=config, metrics=figures)
        made.roofline = Roofline(mbu=0.5, mfu=0.5, share=0.5)
        write(
            tmp_path / "runs",
            made,
            {"whole": idle, "decoding": idle} if config["runtime"]["profile"] else None,
        )
    text, rows = collated(tmp_path / "runs", monkeypatch)
    assert len(rows) == len(load_script("gpu_targets").TARGETS) and "not measured" not in text
    beside = [config for config in planned if config["sweep"]["name"] == "gpu-256-requests"]
    assert [config["choices"]["engine"] for config in beside] == ["minivllm"] * 2 + [
        "transformers_continuous"
    ]
    for same in ("workload", "arrival", "model"):
        assert all(config[same] == beside[0][same] for config in beside)
    assert {config["measure"]["repeats"] for config in beside} == {2}
