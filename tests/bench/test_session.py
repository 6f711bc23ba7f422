"""A session measures limits, and again where a run has passed them; it records what drafts did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minivllm.bench import driver, engine_hardware, session
from minivllm.bench.hardware.energy import CounterMeter
from minivllm.bench.hardware.readings import Roofline
from minivllm.bench.metrics import request_trace, roofline
from minivllm.bench.records.measurement import Measurement
from minivllm.config.compose import compose

HIGH = Roofline(1e15, 1e18, "float32")


@pytest.mark.parametrize(
    ("later", "ok"),
    [
        ([HIGH], True),
        ([Roofline(2.0, 2.0), Roofline(0.5, 1e18), HIGH], True),  # as often as need be
        ([Roofline(2.0, 2.0)] * roofline.MOST_PROBES, False),  # but not for ever
    ],
)
def test_limits_that_a_run_has_passed_are_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, later: list[Roofline], ok: bool
) -> None:
    probes, highest = [Roofline(1.0, 1.0, "float32"), *later], later[-1].bandwidth_bytes_per_s
    for module in (engine_hardware, roofline):
        monkeypatch.setattr(module, "probe", lambda device, dtype: (probes.pop(0), []))
    monkeypatch.setattr(engine_hardware, "last_level_cache", lambda: 1)
    config = compose(["workload.num_requests=2", "workload.output_len=4", "quant=fp32"])
    directory = str(tmp_path / "sweep" / "cell-r")
    record = (
        session.Session(config, lambda event, **details: None)
        .measure(Measurement("r", "c", "sweep", "a", 0, directory, config))
        .record
    )
    assert not probes
    assert record.validity.ok is ok
    assert record.roofline.bandwidth_bytes_per_s == highest
    assert any("measured again" in note for note in record.validity.notes)
    assert record.roofline.mbu is not None and (record.roofline.mbu < 1) is ok


@pytest.mark.parametrize("overlap", [True, False])
def test_where_steps_overlap_a_note_says_how_shares_of_the_limits_are_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, overlap: bool
) -> None:
    monkeypatch.setattr(
        engine_hardware, "probe", lambda device, dtype: (Roofline(1e15, 1e18, "float32"), [])
    )
    config = compose(
        [
            "workload.num_requests=2",
            "workload.output_len=6",
            "quant=fp32",
            f"runtime.overlap={str(overlap).lower()}",
        ]
    )
    directory = str(tmp_path / "sweep" / "cell-r")
    record = (
        session.Session(config, lambda event, **details: None)
        .measure(Measurement("r", "c", "sweep", "a", 0, directory, config))
        .record
    )
    assert record.validity.ok
    assert record.roofline.mbu is not None and record.roofline.decode_s is not None
    assert 0 < record.roofline.decode_s < (record.metrics.duration_s or 0)
    # of the one step with prompts no other is behind
    assert (record.roofline.mfu is None) is overlap
    assert any("steps overlapped" in note for note in record.validity.notes) is overlap


def test_energy_is_of_the_run_alone_and_of_tokens_that_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Prompts are made before the window opens; tokens of a request that was shed are nobody's."""
    happened: list[str] = []
    make, run = driver.prompt_for, driver.Drive.run

    def prompt_for(*args: Any) -> list[int]:
        happened.append("prompt")
        return make(*args)

    def shed_one(self: driver.Drive) -> list[request_trace.RequestTrace]:
        traces = run(self)
        traces[0].finish_reason = "shed"
        return traces

    def read() -> float:
        happened.append("read")
        return 60.0 * happened.count("read")

    monkeypatch.setattr(driver, "prompt_for", prompt_for)
    monkeypatch.setattr(driver.Drive, "run", shed_one)
    monkeypatch.setattr(CounterMeter, "idle_watts", lambda self: None)
    monkeypatch.setattr(engine_hardware, "open_meter", lambda *args: CounterMeter(read, "rapl"))
    config = compose(["workload.num_requests=3", "workload.output_len=4", "measure.roofline=false"])
    directory = str(tmp_path / "sweep" / "cell-r")
    record = (
        session.Session(config, lambda event, **details: None)
        .measure(Measurement("r", "c", "sweep", "a", 0, directory, config))
        .record
    )
    window = happened[happened.index("read") :]
    assert window == ["read", "read"]
    assert record.metrics.output_tokens == 8 and record.energy.joules == 60
    assert record.energy.joules_per_output_token == 7.5


def test_what_drafts_did_is_recorded_and_an_acceptance_that_was_set_is_a_note(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        engine_hardware, "probe", lambda device, dtype: (Roofline(1e15, 1e18, "float32"), [])
    )
    load = ("workload.num_requests=2", "workload.output_len=12", "quant=fp32")
    knobs = ("speculative.adaptive=false", "speculative.acceptance=[1.0,0.0]")
    directory = str(tmp_path / "sweep" / "cell-r")
    results = {}
    for speculative in ("early_exit", "none"):
        config = compose([*load, f"speculative={speculative}", *knobs * (speculative != "none")])
        measured = session.Session(config, lambda event, **details: None)
        results[speculative] = measured.measure(
            Measurement("r", "c", "sweep", "a", 0, directory, config)
        )
    record, rows = results["early_exit"].record, results["early_exit"].requests
    drafts = record.speculation
    assert drafts is not None and record.validity.ok and record.roofline.mbu is not None
    assert drafts.given_acceptance == [1.0, 0.0] and drafts.acceptance_by_position[:2] == [1.0, 0.0]
    assert drafts.num_accepted_tokens == drafts.num_drafts > 0
    assert sum(row["draft_tokens"] for row in rows) == drafts.num_draft_tokens
    assert sum(row["accepted_tokens"] for row in rows) == drafts.num_accepted_tokens
    assert any(note.startswith("acceptance set:") for note in record.validity.notes)
    plain = results["none"]
    assert plain.record.speculation is None
    assert {row["draft_tokens"] for row in plain.requests} == {None}
