"""What an engine tells of a measured window, and what becomes of it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minivllm.bench import observation
from minivllm.bench.observation import EventRecorder
from minivllm.bench.records.events import read_events, write_events
from minivllm.bench.records.measurement import Measurement
from minivllm.bench.session import Session, SessionResult
from minivllm.config.compose import compose
from minivllm.engines.minivllm.engine import MinivllmEngine
from minivllm.engines.simulated.engine import SimulatedEngine
from minivllm.errors import BadInput
from minivllm.extras.observation.bundle import StepBundle
from minivllm.extras.observation.observer import StepObserver
from minivllm.report.view.account import Account
from minivllm.report.view.why import parts

LOAD = (
    *("workload.num_requests=6", "workload.output_len=12", "batching.max_num_seqs=3"),
    *("cache.block_size=16", "measure.roofline=false", "runtime.threads=1", "measure.events=true"),
)
SIMULATED = (
    *("engine=simulated", "engine.bandwidth_gb_s=20", "engine.tflops=0.5", "runtime.threads=null"),
    *("engine.overhead_ms=1", "arrival=poisson", "arrival.rate=40"),
)


def measured(folder: Path, *overrides: str) -> SessionResult:
    config = compose([*LOAD, *overrides])
    session = Session(config, lambda event, **details: None)
    return session.measure(Measurement("r", "c", "s", "a", 0, str(folder / "s" / "cell-r"), config))


def test_the_file_gives_back_what_the_sink_got_and_it_accounts_for_the_time_of_each_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A real run. Its requests' parts sum to their end-to-end times within 1 %."""
    live: list[Any] = []
    before: list[int] = []

    def observe(self: MinivllmEngine, sink: Any) -> StepObserver:
        before.append(len(self.steps()))

        def both(bundle: StepBundle) -> None:
            live.append(json.loads(json.dumps(bundle)))
            sink(bundle)

        return StepObserver(self.engine.scheduler, both)

    monkeypatch.setattr(MinivllmEngine, "observe", observe)
    result = measured(tmp_path, "workload.output_len={distribution:uniform,min:9,max:30}")
    write_events(tmp_path, result.events)
    items = read_events(tmp_path)
    assert items == live and "engine" in items[0] and "new" not in items[0]
    assert before == [0]  # no step of the warm-up
    assert sum("step" in item for item in items) == len(result.steps)
    events = result.record.events
    assert events is not None and events.unix_s is not None
    assert (events.bundles, events.left_out) == (len(items), 0)
    account = Account.of(items)
    lives = {life.new.request_id: life for life in account.lives.values()}
    assert len(result.requests) == len(lives) == 6
    unaccounted = []
    for row in result.requests:
        life = lives[row["request_id"]]
        client_ms = 1e3 * (life.new.arrival_s - row["scheduled_s"])
        spent = parts(life, account, client_ms)
        assert life.end_s is not None
        late_ms = 1e3 * (row["last_token_s"] - life.end_s)  # from the step's end to the caller
        assert sum(spent.values()) + late_ms == pytest.approx(row["e2e_ms"], abs=0.01)
        assert late_ms > -0.01  # times of events are whole microseconds
        unaccounted.append(late_ms / row["e2e_ms"])
        assert spent["prefill"] > 0 and spent["decode"] > 0
        assert life.steps["decode"] == row["output_tokens"] - 1
    # Of the least one: time that the events miss delays every request, while a machine that is busy
    # with something else delays those that end in one step, of which there are several.
    assert len({row["last_token_s"] for row in result.requests}) > 3
    assert min(unaccounted) < 0.01
    assert sum("queued" in life.ms for life in lives.values()) >= 3


def test_a_simulation_writes_the_same_under_its_virtual_clock_whoever_runs_it(
    tmp_path: Path,
) -> None:
    """Even of texts Python makes other hashes in each process."""
    knobs = (*SIMULATED, "workload=shared_prefix", "cache.prefix_caching=true")
    result = measured(tmp_path, *knobs)
    events, text = result.record.events, b"".join(result.events)
    assert events is not None and events.unix_s is None and events.bundles == len(result.events)
    assert b"BlockStored" in text
    assert b"".join(measured(tmp_path, *knobs).events) == text
    script = (
        "import hashlib, pathlib, tests.bench.test_observation as test\n"
        f"events = test.measured(pathlib.Path(), *{knobs!r}).events\n"
        "print(hashlib.sha256(b''.join(events)).hexdigest())"
    )
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": root, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == hashlib.sha256(text).hexdigest(), done.stderr


def test_nobody_observes_unless_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(SimulatedEngine, "observe")
    result = measured(tmp_path, *SIMULATED, "measure.events=false")
    assert result.record.events is None and result.events == []
    with pytest.raises(
        BadInput, match=r"measure\.events=true is not supported by engine=simulated"
    ):
        measured(tmp_path, *SIMULATED)


def test_an_engine_without_events_is_rejected_before_it_is_built() -> None:
    config = compose(["engine=openai", "measure.events=true", "engine.url=http://localhost:1/v1"])
    with pytest.raises(BadInput, match=r"measure\.events=true is not supported by engine=openai"):
        observation.validate(config)
    observation.validate(compose(["measure.events=true"]))


def test_what_exceeds_the_bound_is_left_out_from_there_on() -> None:
    recorder = EventRecorder(60)
    for bundle in ({"time_s": 1.0}, {"time_s": 2.0, "new": []}, {"kv_events": [{}] * 20}, {}):
        recorder(bundle)  # type: ignore[arg-type]
    assert recorder.lines == [b'{"time_s":1.0}', b'{"time_s":2.0,"new":[]}']
    recorded = recorder.recorded(simulated=False)
    assert (recorded.bundles, recorded.left_out) == (2, 2)
    assert "the last 2 of 4 events were left out" in recorder.note


def test_a_task_that_records_no_steps_rejects_events() -> None:
    with pytest.raises(BadInput, match=r"measure\.events=true is for task=bench"):
        compose(["task=quality", "measure.events=true"])
