"""task=bench as a user meets it: exit codes, summary, report, and nothing left by a mistake."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from minivllm.bench import supervisor
from minivllm.bench.records import identity, storage
from minivllm.config.compose import compose
from minivllm.errors import BadInput
from minivllm.experiments import preflight
from minivllm.experiments.jobs import job_files
from minivllm.tasks import bench
from tests.bench.test_supervisor import ROOT, make_config
from tests.forked import fork_known
from tests.pictures import painted_if_own


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Workers are forks that find the engines of tests, and reports have no pictures that all
    have."""
    fork_known(monkeypatch)
    monkeypatch.setattr("minivllm.report.page.finish", painted_if_own)
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))


def lone(tmp_path: Path, fault: str | None = None, **parts: Any) -> dict[str, Any]:
    folders = {
        "runs_dir": str(tmp_path / "runs"),
        "reports_dir": str(tmp_path / "reports"),
        "name": None,
    }
    return {**make_config(fault, **parts), **folders, "sweep": {"plan": None}}


def test_a_lone_run_ends_in_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run(lone(tmp_path, measure={"repeats": 2})) == 0
    printed = capsys.readouterr().out
    (run,) = (path for path in (tmp_path / "runs").iterdir() if path.name != "workloads")
    assert len(list(run.glob("*/record.json"))) == 2
    page = tmp_path / "reports" / run.name / "index.html"
    assert page.exists() and f"report: {page}" in printed
    assert "[1/2]" in printed and "repeat 2/2" in printed


def test_lone_runs_never_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda form, *_: "now")
    assert bench.run(lone(tmp_path)) == bench.run(lone(tmp_path)) == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [
        "now",
        "now-2",
        "workloads",
    ]


@pytest.mark.parametrize("name", [None, "mine"])
def test_no_folder_for_records_is_a_mistake_of_the_users(tmp_path: Path, name: str | None) -> None:
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked" / "mine").write_text("a file")
    config = lone(tmp_path) | {"name": name, "runs_dir": str(tmp_path / "locked")}
    if name is None:
        config["runs_dir"] += "/mine"
    with pytest.raises(
        BadInput,
        match=r"name=mine: .* is not a folder" if name else "no folder for records can be made",
    ):
        bench.run(config)


def test_a_failure_is_reported_with_exit_code_1(tmp_path: Path) -> None:
    assert bench.run(lone(tmp_path, "kill") | {"name": "mine"}) == 1
    record = json.loads(next((tmp_path / "runs" / "mine").glob("*/record.json")).read_text())
    assert record["status"] == "crashed" and record["sweep"] == "mine"
    assert (tmp_path / "reports" / "mine" / "index.html").exists()


@pytest.mark.parametrize("fault", ["reject_build", "reject_request"])
def test_a_mistake_that_the_worker_sees_leaves_nothing(tmp_path: Path, fault: str) -> None:
    with pytest.raises(BadInput):
        bench.run(lone(tmp_path, fault))
    assert not (tmp_path / "runs").exists() and not (tmp_path / "reports").exists()


def test_a_mistake_that_shows_at_once_starts_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        bench, "supervise", lambda *args, **kwargs: pytest.fail("a worker was started")
    )
    with pytest.raises(BadInput, match="workload"):
        bench.run(lone(tmp_path, workload={"num_requests": 0}))


def test_a_cell_is_validated_without_being_measured(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        bench, "supervise", lambda *args, **kwargs: pytest.fail("a worker was started")
    )
    done = cli("quant=int8", "measure.repeats=3", "name=mine", "sweep.dry_run=true")
    assert done.code == 0 and not any(Path().iterdir()), done.err
    assert (
        done.out.startswith("tiny-int8-continuous, cell ")
        and "3 measurements into runs/mine/" in done.out
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("attention=triton", "attention.split_size=100"),
            "attention.split_size=100 must be a power of two",
        ),
        (("cache.eviction=h2o", "attention=sdpa"), "attention=sdpa cannot return the attention"),
        (("runtime.determinism=batch", "attention=sdpa"), "SDPABackend is not batch-invariant"),
        (("runtime.moe=grouped",), "runtime.moe=grouped: the model has no experts to group"),
        (("decoding.n=4",), "decoding.n=4: a measurement takes one completion a request"),
        (
            ("decoding=beam", "decoding.n=2"),
            "decoding.n=2: a measurement takes one completion a request",
        ),
    ],
)
@pytest.mark.parametrize(
    "how", [(), ("-m",), ("-m", "sweep.dry_run=true")], ids=["lone", "sweep", "dry run"]
)
def test_what_the_configuration_says_is_refused_before_a_worker_starts(
    cli: Any,
    monkeypatch: pytest.MonkeyPatch,
    overrides: Sequence[str],
    message: str,
    how: Sequence[str],
) -> None:
    monkeypatch.setattr(
        bench, "supervise", lambda *args, **kwargs: pytest.fail("a worker was started")
    )
    done = cli(*how, *overrides)
    assert done.code == 2 and message in done.err and done.err.count("\n") == 1, done.err
    assert not any(Path().iterdir())


@pytest.mark.parametrize(
    "overrides",
    [
        ("cache.eviction=h2o", "attention=eager"),
        ("cache.eviction=streaming", "attention=sdpa"),
        ("runtime.determinism=batch", "attention=triton"),
        ("runtime.determinism=run", "attention=sdpa"),
        ("runtime.moe=grouped", "model=mixtral_8x7b", "model.weights=random"),
        ("decoding=beam",),
        ("decoding.n=4", "measure.quality=true", "task=quality"),
    ],
)
def test_what_can_be_measured_is_not_refused(overrides: Sequence[str]) -> None:
    config = compose(overrides)
    checked, _, _ = preflight.check(config)
    assert checked["runtime"] == config["runtime"]


@pytest.mark.parametrize(
    ("built_for_gpus", "engine", "refused"),
    [
        (False, "minivllm", True),
        (True, "minivllm", False),
        (False, "simulated", False),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, built_for_gpus: bool, engine: str, refused: bool
) -> None:
    monkeypatch.setattr(preflight, "is_torch_for_gpus", lambda: built_for_gpus)
    config = compose([f"engine={engine}", "runtime.device=cuda:1"])
    if refused:
        with pytest.raises(
            BadInput, match=r"runtime.device=cuda:1: the installed torch supports no GPU"
        ):
            preflight.require_hardware(config)
    else:
        preflight.require_hardware(config)


def test_prompts_longer_than_the_context_are_seen_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    architecture = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
    model = {
        "_target_": "minivllm.models.load.loading.load_model",
        "path": "",
        "weights": "random",
        "max_model_len": None,
        "seed": 0,
        "architecture": architecture,
    }
    config = {
        **make_config(workload={"input_len": 100}),
        "model": model,
        **{group: compose([])[group] for group in ("speculative", "pruning", "vision", "parallel")},
    }
    checked, fingerprint, warnings = preflight.check(config)
    assert checked["model"]["weights"] == "random" and fingerprint and "random" in warnings[0]
    # which has no weights
    whole = compose(["engine=simulated", "engine.bandwidth_gb_s=1", "engine.tflops=1"])
    own = ("model", "workload", "speculative", "pruning")
    simulated = {**whole, **{group: config[group] for group in own}}
    assert preflight.check(simulated)[2] == []
    with pytest.raises(BadInput, match="context holds 128"):
        preflight.check({**config, "workload": {**config["workload"], "input_len": 120}})
    with pytest.raises(BadInput, match="context holds 64"):
        preflight.check({**config, "model": {**model, "max_model_len": 64}})


def test_requests_that_never_have_their_blocks_are_seen_at_once() -> None:
    """Smoke's longest request stores 95 tokens."""
    with pytest.raises(BadInput, match=r"cache.num_blocks=5 holds 80 tokens, fewer than the long"):
        preflight.check(compose(["cache.num_blocks=5"]))
    preflight.check(compose(["cache.num_blocks=6"]))
    preflight.check(compose(["cache.num_blocks=5", "cache.eviction=streaming"]))


def test_ranks_that_cannot_share_the_model_are_named_before_a_process_starts() -> None:
    with pytest.raises(BadInput, match=r"parallel.tensor=3: ranks cannot share 4 attention heads"):
        preflight.check(compose(["parallel.tensor=3"]))
    preflight.check(compose(["parallel.tensor=2"]))


def test_a_report_that_cannot_be_written_hides_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "mine").write_text("a file")
    assert bench.run(lone(tmp_path) | {"name": "mine"}) == 1
    printed = capsys.readouterr()
    assert (
        "tok/s" in printed.out
        and "error: the report could not be built: reports_dir=" in printed.err
    )
    assert list((tmp_path / "runs" / "mine").glob("*/record.json"))


def test_ctrl_c_reports_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(measurements: Any, on_progress: Any, lone: bool) -> Any:
        supervisor.run(measurements[:1], on_progress, lone)
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "supervise", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench.run(lone(tmp_path, measure={"repeats": 2}) | {"name": "cut"})
    assert (tmp_path / "reports" / "cut" / "index.html").exists()


def test_a_job_of_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = lone(tmp_path)
    jobs = [
        identity.expand(make_config(fault), "swept", f"arm{i}", tmp_path / "runs", "f")
        for i, fault in enumerate((None, "raise"))
    ]
    contents = [
        {"before": i, "total": 2, "measurements": [m.to_dict() for m in job]}
        for i, job in enumerate(jobs)
    ]
    with job_files(tmp_path / "runs" / "swept", contents) as paths:
        assert bench.run(config | {"sweep": {"plan": str(paths[0])}}) == 0
        assert bench.run(config | {"sweep": {"plan": str(paths[1])}}) == 1
        assert not any(path.exists() for path in paths)  # each job has removed its own
    printed = capsys.readouterr().out
    assert "[1/2]" in printed and "[2/2]" in printed
    assert len(list((tmp_path / "runs" / "swept").glob("*/record.json"))) == 2
    assert not (tmp_path / "reports").exists()  # the sweeper reports
    (tmp_path / "other.json").write_text('{"config": {}}')
    with pytest.raises(BadInput, match="is not a job that measures"):
        bench.run(config | {"sweep": {"plan": str(tmp_path / "other.json")}})


def test_what_another_command_has_measured_meanwhile_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job that has waited in a queue finds its measurement recorded."""
    (measurement,) = identity.expand(make_config(), "swept", "arm", tmp_path / "runs", "f")
    content = {"before": 0, "total": 1, "measurements": [measurement.to_dict()]}
    record = measurement.path / "record.json"
    with job_files(tmp_path / "runs" / "swept", [content]) as (path,):
        storage.write_record(measurement.path, measurement.record("ok"), config=measurement.config)
        made = path.stat().st_mtime_ns
        os.utime(record, ns=(made + 1, made + 1))
        assert bench.run(lone(tmp_path) | {"sweep": {"plan": str(path)}}) == 0
    assert record.stat().st_mtime_ns == made + 1
    assert "1 of 1 recorded since, skipped" in capsys.readouterr().out
