"""The files of jobs, and jobs without a result."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from minivllm.config.compose import compose
from minivllm.errors import BadInput
from minivllm.experiments import jobs, plain


def test_files_are_there_until_the_jobs_have_ended(tmp_path: Path) -> None:
    with jobs.job_files(tmp_path / "s", [{"config": {"a": 1}}, {}]) as paths:
        assert [json.loads(path.read_text()) for path in paths] == [{"config": {"a": 1}}, {}]
        assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
        assert not jobs.has_begun(paths[0])
        jobs.read_job(paths[0])
        assert [jobs.has_begun(path) for path in paths] == [True, False]
        jobs.discard(paths[1])
    assert not (tmp_path / "s" / jobs.FOLDER).exists()


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
        jobs.mark_queued(["a=b", f"sweep.plan='{left[1]}'"])
        raise jobs.JobsContinue("it goes on")
    jobs.discard_left(tmp_path)
    assert [path.exists() for path in left] == [False, True]
    jobs.discard(left[1])
    assert not left[1].parent.exists()


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
