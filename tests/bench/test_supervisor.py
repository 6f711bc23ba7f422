"""Whatever a worker does, each measurement leaves one whole record, or none and no trace."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from minivllm import redaction
from minivllm.bench import supervisor, worker_process
from minivllm.bench.device_lock import device_lock
from minivllm.bench.hardware import telemetry
from minivllm.bench.records import identity, storage
from minivllm.bench.records.measurement import Measurement
from minivllm.bench.records.reading import scan
from minivllm.errors import BadInput
from minivllm.platform import files
from tests.forked import fork_known

ROOT = Path(__file__).resolve().parents[2]
FAULTY = "tests.bench.faulty.FaultyEngine"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    fork_known(monkeypatch)
    # A lock folder of the test's own, so that a benchmark running beside does not hold the tests
    # up.
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))


def make_config(fault: str | None = None, **parts: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model": {"_target_": "none", "path": "none"},
        "quant": {},
        "batching": {},
        "decoding": {"_target_": "minivllm.engine.options.SamplingParams"},
        "workload": {
            "_target_": "minivllm.bench.workloads.synthetic.Smoke",
            "num_requests": 6,
            "input_len": 8,
            "output_len": 12,
        },
        "arrival": {"_target_": "minivllm.bench.workloads.arrivals.Offline"},
        "engine": {"_target_": FAULTY, "fault": fault},
        "runtime": {"device": "cpu", "threads": 1},
        "measure": {
            "warmup_requests": "auto",
            "repeats": 1,
            "seed": 0,
            "timeout_s": 60,
            "isolation": "cell",
            "slo": {},
            "price": {"device_hour": 1.0, "kwh": None, "currency": "EUR"},
            "roofline": True,
            "memory_limit_gb": None,
            "telemetry_interval_s": 0.02,
        },
        "choices": {"model": "none", "quant": "bf16", "batching": "continuous", "engine": "faulty"},
    }
    for group, knobs in parts.items():
        config[group] = {**config[group], **knobs}
    return config


def plan(root: Path, *configs: dict[str, Any]) -> list[Measurement]:
    return [
        measurement
        for i, config in enumerate(configs)
        for measurement in identity.expand(config, "sweep", f"arm{i}", root / "runs", "fingerprint")
    ]


def record_of(measurement: Measurement) -> dict[str, Any]:
    return json.loads((measurement.path / storage.RECORD).read_text())


def workers() -> list[int]:
    """Process ids of the workers of this process, which have sessions of their own."""
    return [child.pid for child in psutil.Process().children() if os.getsid(child.pid) == child.pid]


def leftovers(root: Path) -> list[str]:
    """Temporary and handed-over files that should not be there any more."""
    return [
        str(p)
        for p in root.rglob("*")
        if p.is_file() and (p.suffix in (".tmp", ".part") or p.name == storage.HANDOVER)
    ]


def test_a_good_measurement_leaves_everything(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    (measurement,) = plan(tmp_path, make_config(engine={"delay_s": 0.002}))
    (outcome,) = supervisor.run([measurement], events.append)
    assert (outcome.status, outcome.message) == ("ok", "")
    record = record_of(measurement)
    assert record["status"] == "ok" and record["validity"]["ok"]
    assert record["metrics"]["output_tokens"] == 72 and record["metrics"]["num_requests"] == 6
    assert record["cold"]["load_s"] == 0.25 and record["cold"]["first_batch_s"] > 0
    assert record["memory"]["kv_waste"] == pytest.approx(0.25)
    assert record["memory"]["host_rss_peak"] > 10e6
    assert record["breakdown"]["forward_ms"] == pytest.approx(2.0)
    assert record["breakdown"]["schedule_ms"] is None
    assert record["liveness"]["engine"]["steps"] == record["breakdown"]["steps"] == 24
    assert record["provenance"]["threads"] == 1 and record["provenance"]["seed"] == 0
    money = record["metrics"]["duration_s"] / 3600 / 72 * 1e6
    assert record["cost"] == {"currency": "EUR", "per_million_output_tokens": pytest.approx(money)}
    assert "weights are random" in record["validity"]["notes"]
    names = {path.name for path in measurement.path.iterdir()}
    assert names == {
        "record.json",
        "requests.parquet",
        "steps.parquet",
        "telemetry.parquet",
        "config.yaml",
        "run.log",
    }
    assert (tmp_path / "runs" / "workloads" / f"{record['workload_hash']}.parquet").exists()
    assert "building an engine" in (measurement.path / storage.LOG).read_text()
    seen = [event["event"] for event in events]
    assert seen[0] == "loading" and seen[-1] == "done" and "measuring" in seen
    assert [event.get("loaded") for event in events if event["event"] == "loading"] == [None, 45]
    measuring = [event for event in events if event["event"] == "measuring"]
    assert measuring[-1]["tokens"] == measuring[-1]["total_tokens"] == 72
    assert not leftovers(tmp_path)


def test_telemetry_covers_the_window_on_the_steps_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second step waits until the window has been sampled, however busy the machine is."""
    import pandas

    inside = 0

    def sample(self: telemetry.Telemetry) -> telemetry.Sample | None:
        nonlocal inside
        begun = self.phase == "measuring" and (tmp_path / "begun").exists()
        row = taken(self)
        inside += begun
        if inside == 5:
            (tmp_path / "go").touch()
        return row

    taken = telemetry.Telemetry.sample
    monkeypatch.setattr(telemetry.Telemetry, "sample", sample)
    config = make_config(engine={"meeting": str(tmp_path)}, measure={"warmup_requests": 0})
    (measurement,) = plan(tmp_path, config)
    supervisor.run([measurement])
    rows = pandas.read_parquet(measurement.path / storage.TELEMETRY)
    steps = pandas.read_parquet(measurement.path / storage.STEPS)
    rows = rows[rows.t_s.between(steps.start_s.min(), steps.start_s.max())]
    assert len(rows) >= 5
    assert set(rows.phase[-5:]) == {"measuring"}  # the supervisor may hear of it late
    assert rows.rss.min() > 10e6


@pytest.mark.parametrize(
    ("fault", "status", "kind", "words"),
    [
        ("raise", "error", "RuntimeError", "the engine broke"),
        ("raise_build", "error", "ValueError", "cannot build"),
        ("kill", "crashed", "SIGKILL", "killed by SIGKILL"),
        ("segfault", "crashed", "SIGSEGV", "killed by SIGSEGV"),
        ("exit", "crashed", "WorkerExit", "exit code 7"),
        ("memory_error", "oom", "MemoryError", "no more"),
        ("reject_build", "invalid", "BadInput", "cannot be built"),
        ("reject_request", "invalid", "BadInput", "larger than the cache"),
    ],
)
def test_a_fault_is_a_row_and_the_sweep_goes_on(
    tmp_path: Path, fault: str, status: str, kind: str, words: str
) -> None:
    broken, good = plan(tmp_path, make_config(fault), make_config())
    outcomes = supervisor.run([broken, good])
    assert [outcome.status for outcome in outcomes] == [status, "ok"]
    assert words in outcomes[0].message
    record = record_of(broken)
    assert record["status"] == status
    assert record["error"]["type"] == kind and words in record["error"]["message"]
    assert "building an engine" in record["error"]["log_tail"]
    assert not record["validity"]["ok"]
    assert record["config"]["engine"]["fault"] == fault
    # What was seen of it from outside, from its beginning on.
    assert record["memory"]["host_rss_peak"] > 0
    assert len(pq.read_table(broken.path / storage.TELEMETRY)) > 0
    assert record_of(good)["status"] == "ok"
    assert not leftovers(tmp_path)


def test_a_traceback_ends_up_in_the_log(tmp_path: Path) -> None:
    (measurement,) = plan(tmp_path, make_config("raise"))
    supervisor.run([measurement])
    log = (measurement.path / storage.LOG).read_text()
    assert "Traceback" in log and "_go_wrong" in log
    assert "the engine broke" in record_of(measurement)["error"]["log_tail"]


def test_what_native_code_prints_is_left_without_secrets(tmp_path: Path) -> None:
    config = make_config("native", engine={"token": "mårker-one"})
    redaction.learn(config)
    measurements = plan(tmp_path, config)
    assert [outcome.status for outcome in supervisor.run(measurements)] == ["ok"]
    log = (measurements[0].path / storage.LOG).read_text()
    assert f"native code has {'*' * 11}\n" in log and log.endswith(f"closed with {'*' * 11}\n")
    assert "rker-one" not in log


def test_a_hanging_worker_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, good = plan(tmp_path, make_config("hang", measure={"timeout_s": 60.5}), make_config())
    log = broken.path / storage.LOG

    def clock() -> float:  # an hour passes once the worker hangs, however long it took to get there
        return time.monotonic() + 3600 * (log.exists() and "hanging" in log.read_text())

    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=clock))
    outcomes = supervisor.run([broken, good])
    assert [outcome.status for outcome in outcomes] == ["timeout", "ok"]
    record = record_of(broken)
    assert (
        record["error"]["type"] == "TimeoutError" and "timeout_s=60.5" in record["error"]["message"]
    )
    assert "hanging" in record["error"]["log_tail"]


def test_too_much_memory_is_oom(tmp_path: Path) -> None:
    (measurement,) = plan(tmp_path, make_config("allocate", measure={"memory_limit_gb": 0.6}))
    (outcome,) = supervisor.run([measurement])
    assert outcome.status == "oom"
    record = record_of(measurement)
    assert "memory_limit_gb=0.6" in record["error"]["message"]
    assert record["memory"]["host_rss_peak"] > 0.6e9
    assert (measurement.path / storage.TELEMETRY).exists()


def test_a_kernel_oom_kill_is_told_from_a_plain_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter([3, 4])
    monkeypatch.setattr(worker_process, "_oom_kills", lambda: next(counts))
    (measurement,) = plan(tmp_path, make_config("kill"))
    (outcome,) = supervisor.run([measurement])
    assert outcome.status == "oom"
    assert "kernel" in record_of(measurement)["error"]["message"]


def test_no_tokens_is_no_result(tmp_path: Path) -> None:
    (measurement,) = plan(tmp_path, make_config("empty"))
    (outcome,) = supervisor.run([measurement])
    record = record_of(measurement)
    assert outcome.status == record["status"] == "invalid"
    assert record["metrics"]["output_tokens_per_s"] is None
    assert "produced no token" in record["error"]["message"]


def test_repeats_share_a_worker(tmp_path: Path) -> None:
    state = tmp_path / "state"
    measurements = plan(tmp_path, make_config(engine={"state": str(state)}, measure={"repeats": 3}))
    outcomes = supervisor.run(measurements)
    assert [outcome.status for outcome in outcomes] == ["ok"] * 3
    assert len(set(state.read_text().split())) == 1
    records = [record_of(measurement) for measurement in measurements]
    assert [record["block"] for record in records] == [0, 1, 2]
    assert len({record["workload_hash"] for record in records}) == 1
    # Only the first block was cold.
    assert [record["cold"]["first_batch_s"] is None for record in records] == [False, True, True]
    assert all(
        (m.path / storage.LOG).exists() and (m.path / storage.CONFIG).exists() for m in measurements
    )


def test_what_an_engine_reads_of_measure_once_gets_a_worker_of_its_own(tmp_path: Path) -> None:
    """A cell with a cold prefix cache must not be measured by an engine that was told to keep
    it."""
    state, warm = tmp_path / "state", {"prefix_cache": "warm"}
    configs = [
        make_config(engine={"state": str(state)}, measure=measure) for measure in ({}, warm, warm)
    ]
    outcomes = supervisor.run(plan(tmp_path, *configs))
    assert [outcome.status for outcome in outcomes] == ["ok"] * 3
    assert len(set(state.read_text().split())) == 2


def test_rates_and_seeds_share_a_worker_that_is_told_of_them_one_by_one(tmp_path: Path) -> None:
    """What comes next may depend on what was measured: the first record is there before the second
    is asked for."""
    state = tmp_path / "state"
    poisson = "minivllm.bench.workloads.arrivals.Poisson"
    first, second = (
        plan(
            tmp_path,
            make_config(
                engine={"state": str(state)},
                arrival={"_target_": poisson, "rate": rate},
                measure={"seed": seed},
            ),
        )[0]
        for rate, seed in ((1000.0, 0), (2000.0, 1))
    )
    totals: list[Any] = []
    with supervisor.Supervisor(
        lambda event: totals.append((event["position"], event["total"]))
    ) as making:
        assert making.measure(first).status == "ok" and record_of(first)["provenance"]["seed"] == 0
        assert making.measure(second).status == "ok"
    assert len(state.read_text().split()) == 1 and set(totals) == {(1, None), (2, None)}
    hashes = {record_of(measurement)["workload_hash"] for measurement in (first, second)}
    assert len(hashes) == 2 and record_of(second)["provenance"]["seed"] == 1


def test_the_device_is_free_between_isolated_measurements(tmp_path: Path) -> None:
    (isolated,) = plan(tmp_path, make_config(measure={"isolation": "run"}))
    with supervisor.Supervisor() as making:
        outcome = making.measure(isolated)
        holders: list[str] = []
        with device_lock(isolated.config, holders.append):
            assert outcome.status == "ok" and holders == []


def test_isolation_run_gives_each_a_worker_of_its_own(tmp_path: Path) -> None:
    state = tmp_path / "state"
    config = make_config(engine={"state": str(state)}, measure={"repeats": 2, "isolation": "run"})
    supervisor.run(plan(tmp_path, config))
    assert len(set(state.read_text().split())) == 2


def test_after_a_crash_the_rest_of_the_batch_gets_a_new_worker(tmp_path: Path) -> None:
    state = tmp_path / "state"
    config = make_config("raise_once", engine={"state": str(state)}, measure={"repeats": 3})
    outcomes = supervisor.run(plan(tmp_path, config))
    assert [outcome.status for outcome in outcomes] == ["error", "ok", "ok"]
    assert len(set(state.read_text().split())) == 2


def test_a_workload_that_does_not_fit_leaves_the_engine_usable(tmp_path: Path) -> None:
    state = tmp_path / "state"
    configs = [
        make_config(engine={"state": str(state)}, workload={"input_len": n}) for n in (8, 500, 9)
    ]
    outcomes = supervisor.run(plan(tmp_path, *configs))
    assert [outcome.status for outcome in outcomes] == ["ok", "invalid", "ok"]
    assert "context" in outcomes[1].message
    assert len(set(state.read_text().split())) == 1


@pytest.mark.parametrize("fault", ["reject_build", "reject_request"])
def test_bad_input_of_a_lone_run_leaves_nothing(tmp_path: Path, fault: str) -> None:
    measurements = plan(tmp_path, make_config(fault, measure={"repeats": 2}))
    with pytest.raises(BadInput, match=r"cannot|larger"):
        supervisor.run(measurements, lone=True)
    assert not (tmp_path / "runs").exists()


def test_full_disk_is_this_cells_failure_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = plan(
        tmp_path, *(make_config(workload={"output_len": n}) for n in (5, 6, 7))
    )
    write = files._write

    def full(path: Path, content: bytes) -> None:
        if path.parent == second.path and path.name.startswith(f".{storage.RECORD}"):
            path.write_bytes(content[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, content)

    monkeypatch.setattr(files, "_write", full)
    outcomes = supervisor.run([first, second, third])
    assert [outcome.status for outcome in outcomes] == ["ok", "error", "ok"]
    assert "No space left" in outcomes[1].message
    assert not (second.path / storage.RECORD).exists()
    assert not leftovers(tmp_path)
    records, unreadable = scan(tmp_path / "runs")
    assert len(records) == 2 and not unreadable


def test_a_worker_that_cannot_write_says_so(tmp_path: Path) -> None:
    (measurement,) = plan(tmp_path, make_config())
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "workloads").write_text("in the way")
    (outcome,) = supervisor.run([measurement])
    assert outcome.status == "error"
    assert record_of(measurement)["error"]["type"] in ("FileExistsError", "NotADirectoryError")


def test_what_is_profiled_has_a_worker_of_its_own(tmp_path: Path) -> None:
    """The profiler stays in its process: no other measurement may be taken there."""
    import pandas

    state = tmp_path / "state"
    config = make_config(
        engine={"state": str(state)},
        runtime={"profile": True},
        measure={"repeats": 2, "timeout_s": 600},
    )
    events: list[str] = []
    measurements = plan(tmp_path, config)
    outcomes = supervisor.run(measurements, lambda event: events.append(event["event"]))
    assert [outcome.status for outcome in outcomes] == ["ok", "ok"]
    assert len(set(state.read_text().split())) == 2
    assert events.index("measuring") < events.index("finishing") < events.index("profiling")
    for measurement in measurements:
        phases = pandas.read_parquet(measurement.path / storage.TELEMETRY)["phase"].tolist()
        assert phases[-1] == "profiling" and "done" not in phases  # no memory of it is the run's
        assert (measurement.path / storage.TRACE).exists() and (
            measurement.path / storage.OPERATIONS
        ).exists()
        record = record_of(measurement)
        assert record["metrics"]["output_tokens"] == 72 and record["breakdown"]["steps"] == 24
        assert not any("runtime.profile" in note for note in record["validity"]["notes"])
    assert not leftovers(tmp_path)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("profile_raise", "the engine broke"),
        ("profile_paragraph", "CUDA error: the device broke"),
        ("profile_kill", "killed by SIGKILL"),
        ("profile_hang", "not done within measure.timeout_s"),
    ],
)
def test_a_trace_that_fails_is_a_note_in_the_record(tmp_path: Path, fault: str, words: str) -> None:
    broken, good = plan(tmp_path, make_config(fault, runtime={"profile": True}), make_config())

    def hear(event: dict[str, Any]) -> None:
        if event["event"] == "profiling" and fault == "profile_hang":
            for name in (
                f".{storage.TRACE}.half.tmp",
                storage.TRACE,
                storage.OPERATIONS,
                storage.IDLE,
            ):
                (broken.path / name).write_text("torn")
            (broken.path / f".{storage.TRACE}.beside").mkdir()
            (broken.path / f".{storage.TRACE}.beside" / "trace.json").write_text("torn")
            making._began_s -= 1000  # its time is over

    with supervisor.Supervisor(hear) as making:
        assert [making.measure(measurement).status for measurement in (broken, good)] == [
            "ok",
            "ok",
        ]
    record = record_of(broken)
    assert record["status"] == "ok" and record["error"] is None and record["validity"]["ok"]
    (note,) = (note for note in record["validity"]["notes"] if "runtime.profile" in note)
    assert note.startswith("runtime.profile: there is no trace: ") and words in note
    assert "\n" not in note and "flag" not in note
    assert record["metrics"]["output_tokens"] == 72 and record["provenance"]["threads"] == 1
    assert (broken.path / storage.REQUESTS).exists() and (broken.path / storage.TELEMETRY).exists()
    assert not [path for path in broken.path.iterdir() if "trace" in path.name]
    assert not leftovers(tmp_path)


def test_ctrl_c_while_profiling_keeps_the_measurement(tmp_path: Path) -> None:
    measurements = plan(
        tmp_path, make_config("profile_hang", runtime={"profile": True}), make_config()
    )
    events: list[tuple[str, str | None]] = []
    pids: list[int] = []

    def interrupt(event: dict[str, Any]) -> None:
        events.append((event["event"], event.get("status")))
        if event["event"] == "profiling":
            (measurements[0].path / f".{storage.TRACE}.half.tmp").write_text("torn")
            pids.extend(workers())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        supervisor.run(measurements, interrupt)
    record = record_of(measurements[0])
    assert record["status"] == "ok" and record["metrics"]["output_tokens"] == 72
    assert "runtime.profile: there is no trace: interrupted" in record["validity"]["notes"]
    assert events[-1] == ("done", "ok")  # whoever follows is told of the record
    assert not [path for path in measurements[0].path.iterdir() if "trace" in path.name]
    assert pids and not any(psutil.pid_exists(pid) for pid in pids)
    assert not measurements[1].path.exists() and not leftovers(tmp_path)


def test_ctrl_c_keeps_what_is_done_and_drops_what_is_not(tmp_path: Path) -> None:
    good, endless = plan(tmp_path, make_config(), make_config("hang"))
    pids: list[int] = []

    def interrupt(event: dict[str, Any]) -> None:
        if event["event"] == "warmup" and event["measurement"] == endless:
            pids.extend(workers())
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()

    with pytest.raises(KeyboardInterrupt):
        supervisor.run([good, endless], interrupt)
    assert record_of(good)["status"] == "ok"
    assert not endless.path.exists()
    assert pids and not any(psutil.pid_exists(pid) for pid in pids)
    assert not leftovers(tmp_path)


def test_an_interrupt_just_after_the_last_write_keeps_the_record(tmp_path: Path) -> None:
    (measurement,) = plan(tmp_path, make_config())

    def interrupt(event: dict[str, Any]) -> None:
        if event["event"] == "done":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        supervisor.run([measurement], interrupt)
    assert record_of(measurement)["status"] == "ok"


def test_a_worker_does_not_outlive_its_supervisor(tmp_path: Path) -> None:
    (measurement,) = plan(tmp_path, make_config("hang"))
    job = tmp_path / "job.json"
    job.write_text(json.dumps(measurement.to_dict()))
    code = (
        "import json, sys; from minivllm.bench import supervisor; from "
        "minivllm.bench.records.measurement import Measurement;import tempfile; "
        "tempfile.gettempdir = lambda: "
        f"{str(tmp_path)!r};supervisor.run([Measurement.from_dict(json.load(open({str(job)!r})))])"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    log = measurement.path / storage.LOG
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (log.exists() and "hanging" in log.read_text()):
        time.sleep(0.05)
    (worker,) = psutil.Process(parent.pid).children()
    parent.kill()
    parent.wait()
    worker.wait(timeout=60)
    assert not (measurement.path / storage.RECORD).exists()
    # What is left is measured again by the next supervisor, whose worker finds a clean directory.
    replacement = Measurement(**{**measurement.to_dict(), "config": make_config()})
    (outcome,) = supervisor.run([replacement])
    assert outcome.status == "ok"


def test_two_supervisors_take_turns_on_a_device(tmp_path: Path) -> None:
    config = make_config()
    order: list[str] = []
    release = threading.Event()

    def hold() -> None:
        with device_lock(config):
            order.append("first has it")
            release.wait(120)
            order.append("first lets go")

    holder = threading.Thread(target=hold)
    holder.start()
    while not order:
        time.sleep(0.01)

    def on_progress(event: dict[str, Any]) -> None:
        order.append(event["event"])
        if event["event"] == "waiting":
            threading.Timer(0.3, release.set).start()

    (outcome,) = supervisor.run(plan(tmp_path, config), on_progress)
    holder.join()
    assert outcome.status == "ok"
    assert order[:3] == ["first has it", "waiting", "first lets go"]
    assert order[3] == "loading"


def test_the_parent_never_imports_torch() -> None:
    code = (
        "import sys, minivllm.bench.supervisor, minivllm.tasks.bench; assert 'torch' not in "
        "sys.modules; assert 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_worker_starts_without_what_only_composing_and_reports_need() -> None:
    code = (
        "import sys, minivllm.bench.worker; "
        "assert not {'hydra', 'omegaconf', 'pandas', 'torch'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
