"""The files of jobs, and jobs without a result."""

from __future__ import annotations

import errno
import json
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minivllm.bench.records.measurement import SIMULATED
from minivllm.config.compose import compose
from minivllm.errors import BadInput
from minivllm.experiments import jobs, plain
from minivllm.platform import files


def test_files_are_there_until_the_jobs_have_ended(tmp_path: Path) -> None:
    with jobs.job_files(tmp_path / "s", [{"config": {"a": 1}}, {}]) as paths:
        assert [json.loads(path.read_text()) for path in paths] == [{"config": {"a": 1}}, {}]
        assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
        assert not jobs.has_begun(paths[0])
        jobs.read_job(paths[0])
        assert [jobs.has_begun(path) for path in paths] == [True, False]
        jobs.discard(paths[1])
    assert not (tmp_path / "s" / jobs.FOLDER).exists()


def test_without_jobs_there_is_no_folder(tmp_path: Path) -> None:
    with jobs.job_files(tmp_path, []) as paths:
        assert paths == [] and not (tmp_path / jobs.FOLDER).exists()


def test_files_of_jobs_that_go_on_stay(tmp_path: Path) -> None:
    with (
        pytest.raises(jobs.JobsContinue),
        jobs.job_files(tmp_path, [{}, {}]) as paths,
    ):
        raise jobs.JobsContinue("jobs 1 and 2 go on")
    assert all(path.exists() for path in paths)
    for path in paths:  # each job removes its own
        jobs.discard(path)
    assert not paths[0].parent.exists()


def test_what_a_killed_command_has_left_goes_but_for_queued_jobs(tmp_path: Path) -> None:
    with pytest.raises(jobs.JobsContinue), jobs.job_files(tmp_path, [{}, {}]) as left:
        jobs.mark_queued(["a=b", f"sweep.plan='{left[1]}'"], submitted("7_1", tmp_path))
        raise jobs.JobsContinue("it goes on")
    jobs.discard_left(tmp_path)
    assert [path.exists() for path in left] == [False, True]
    jobs.discard(left[1])
    assert not left[1].parent.exists()


def test_a_mark_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another command may read it at any time, and the disk may be full."""

    def full(path: Path, content: bytes) -> None:
        path.write_bytes(content[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    with jobs.job_files(tmp_path, [{}]) as (path,):
        monkeypatch.setattr(files, "_write", full)
        with pytest.raises(OSError, match="No space"):
            jobs.mark_queued([f"sweep.plan={path}"], submitted("7_1", tmp_path))
        assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_the_mark_of_a_job_that_has_ended_before_does_not_stay(tmp_path: Path) -> None:
    with pytest.raises(jobs.JobsContinue), jobs.job_files(tmp_path, [{}]) as (path,):
        jobs.discard(path)
        jobs.mark_queued([f"sweep.plan={path}"], submitted("7_1", tmp_path))
        raise jobs.JobsContinue("it goes on")
    assert jobs.queued_jobs(tmp_path) == []
    jobs.discard_left(tmp_path)
    assert not path.parent.exists()


def submitted(job_id: str, folder: Path) -> Any:
    """A job as submitit gives it."""
    return SimpleNamespace(job_id=job_id, paths=SimpleNamespace(folder=folder))


def test_the_next_command_waits_for_queued_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    states = ["PENDING", "RUNNING", "COMPLETED"]

    class SlurmJob:
        def __init__(self, folder: str, job_id: str) -> None:
            assert (folder, job_id) == (str(tmp_path), "7_1")
            self.paths = SimpleNamespace(result_pickle=tmp_path / "none")

        def done(self) -> bool:
            self.state = states.pop(0)
            return self.state == "COMPLETED"

    submitit = pytest.importorskip("submitit")
    monkeypatch.setattr(submitit, "SlurmJob", SlurmJob)
    monkeypatch.setattr("time.sleep", lambda s: None)
    content = {"measurements": [{"run_id": "a", "config": {}}, {"run_id": "b", "config": {}}]}
    with pytest.raises(jobs.JobsContinue), jobs.job_files(tmp_path, [content]) as (path,):
        jobs.mark_queued([f"sweep.plan={path}"], submitted("7_1", tmp_path))
        raise jobs.JobsContinue("it goes on")
    jobs.discard_left(tmp_path)
    (found,) = jobs.queued_jobs(tmp_path)
    assert found.run_ids == {"a", "b"} and not jobs.has_begun(path)
    jobs.await_queued([found])
    assert capsys.readouterr().out == "waiting for jobs of an earlier command: 7_1\n"
    assert not states and jobs.queued_jobs(tmp_path) == [] and not path.parent.exists()


@pytest.mark.parametrize(
    "queue",
    [
        ["PENDING", "CANCELLED", ""],
        ["UNKNOWN", "RUNNING", "", "UNKNOWN", "", ""],
        ["COMPLETED", "COMPLETED"],
    ],
)
def test_a_job_that_accounting_does_not_know_is_looked_for_in_the_queue(
    queue: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    clock = SimpleNamespace(sleep=slept.append, monotonic=lambda: sum(slept))
    monkeypatch.setattr(jobs, "time", clock)
    left = list(queue)
    monkeypatch.setattr(jobs, "queue_state", lambda job: left.pop(0))
    forced: list[str] = []
    jobs.wait_for(SimpleNamespace(done=lambda: False, get_info=lambda mode: forced.append(mode)))
    assert not left and sum(slept) >= len(queue) * jobs.ASK_S
    assert forced == ["force"] * (len(queue) - 1)


@pytest.mark.parametrize(
    ("code", "out", "error", "state"),
    [
        (0, "RUNNING\n", "", "RUNNING"),
        (0, "", "", ""),
        (1, "", "slurm_load_jobs error: Invalid job id specified", ""),
        (1, "", "slurm_load_jobs error: Unable to contact slurm controller", "UNKNOWN"),
    ],
)
def test_what_the_queue_says(
    code: int, out: str, error: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = SimpleNamespace(returncode=code, stdout=out, stderr=error)
    monkeypatch.setattr("subprocess.run", lambda *_, **__: done)
    monkeypatch.setattr(pytest.importorskip("submitit"), "SlurmJob", SimpleNamespace)
    assert jobs.queue_state(SimpleNamespace(job_id="7_1")) == state
    assert jobs.queue_state(object()) == "UNKNOWN"


def test_ctrl_c_leaves_queued_jobs_to_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(self: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs.QueuedJob, "wait", wait)
    left = [jobs.QueuedJob(tmp_path / name, f"7_{name}", "", frozenset()) for name in "01"]
    with pytest.raises(jobs.JobsContinue, match=r"^jobs 7_0, 7_1 go on .* scancel 7 ends them$"):
        jobs.await_queued(left)


def test_a_suspended_job_has_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For submitit it has, and it asks no more."""
    states, cleared = ["SUSPENDED", "SUSPENDED", "CANCELLED by 0"], []
    job = SimpleNamespace(
        **{"paths": SimpleNamespace(result_pickle=tmp_path / "none"), "state": states[0]},
        watcher=SimpleNamespace(clear=lambda: cleared.append(1)),
    )
    job.done = lambda: setattr(job, "state", states[len(cleared)]) is None
    monkeypatch.setattr("time.sleep", lambda s: None)
    jobs.wait_for(job)
    assert len(cleared) == 2


def test_only_what_waits_for_a_device_takes_turns(tmp_path: Path) -> None:
    configs = [{"engine": {"_target_": target}} for target in ("a.Engine", SIMULATED)]
    contents = [{"measurements": [{"config": config}]} for config in configs]
    with jobs.job_files(tmp_path, [*contents, {"config": {}}]) as paths:
        found = [jobs.takes_device(["a=b", f"sweep.plan='{path}'"]) for path in paths]
        assert found == [True, False, False] and not jobs.takes_device(["a=b"])
        assert not any(jobs.has_begun(path) for path in paths)


def test_no_two_commands_share_a_file(tmp_path: Path) -> None:
    with jobs.job_files(tmp_path, [{}]) as first, jobs.job_files(tmp_path, [{}]) as second:
        assert first != second
        jobs.discard(second[0])
        assert first[0].exists()


def test_a_job_goes_to_the_folder_of_its_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "job.json").write_text(json.dumps({"measurements": []}))
    config = compose(["sweep.plan=job.json", f"sweep.cwd={tmp_path / 'sweep'}"])
    assert plain.settings_of_job(config) == config
    assert Path.cwd() == tmp_path / "sweep"
    with pytest.raises(BadInput, match=r"has no folder /nowhere .* under the same path"):
        plain.settings_of_job(compose(["sweep.plan=job.json", "sweep.cwd=/nowhere"]))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (jobs.LostJob("TIMEOUT", "job 3 ended"), ("timeout", "TIMEOUT", "job 3 ended")),
        (jobs.LostJob("OUT_OF_MEMORY", "x"), ("oom", "OUT_OF_MEMORY", "x")),
        (jobs.LostJob("PREEMPTED", "x"), ("crashed", "PREEMPTED", "x")),
        (BadInput("wrong"), ("invalid", "BadInput", "wrong")),
        (OSError("\nfirst\nsecond"), ("crashed", "OSError", "first")),
        (KeyError(), ("crashed", "KeyError", "it gave no reason")),
    ],
)
def test_a_failure_has_a_status_a_kind_and_a_line(
    error: Exception, expected: tuple[str, str, str]
) -> None:
    assert jobs.reason(error) == expected
