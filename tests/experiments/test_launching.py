"""Whichever launcher runs a sweep, with every setting that the documentation names: the same
records, one measurement at a time on a device."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from minivllm.cli import _verbatim
from minivllm.config import compose
from minivllm.experiments import launching
from minivllm.experiments.jobs import QUEUED, FailedJob, JobsContinue, LostJob
from tests.experiments import cluster
from tests.test_docs import LAUNCHER, PAGES, commands

SWEEP = ("engine.delay_s=0.001,0.002", "workload.num_requests=2,3", "measure.repeats=2")
ELSEWHERE = "else where"
ADDRESS = "hydra.launcher.ray.init.address=auto"
WORDS = {
    "joblib": (),
    "submitit_local": (f"runs_dir={ELSEWHERE}",),
    "submitit_slurm": ("hydra.launcher.mem_gb=1",),
    "ray": (
        "hydra.launcher.ray.init.include_dashboard=false",  # takes longer than all else
        "+hydra.launcher.ray.init.num_gpus=1",  # which is here a word
    ),
}
PACKAGES = {
    "joblib": "hydra_joblib_launcher",
    "submitit_local": "hydra_submitit_launcher",
    "submitit_slurm": "hydra_submitit_launcher",
    "ray": "hydra_ray_launcher",
}
JOBLIB = SimpleNamespace(
    joblib={"n_jobs": 3, "verbose": 0, "pre_dispatch": "n_jobs", "batch_size": 1},
    **dict.fromkeys(("hydra_context", "config", "task_function")),
)
PHRASE = re.compile(r"`(hydra[./]launcher[^`\s<]*=[^`\s]*[^`\s.])`")


def documented() -> set[tuple[str, ...]]:
    """The settings of launchers in each command of the documentation, and each in a phrase."""
    found = {(phrase,) for page in PAGES for phrase in PHRASE.findall(page.read_text())}
    for page in PAGES:
        for command in commands(page):
            found.add(tuple(word for word in command if word.startswith(LAUNCHER)))
    return found - {()}


def launchers_of(settings: Sequence[str]) -> list[str]:
    """The launchers that have these settings."""
    named = [word.partition("=")[2] for word in settings if word.startswith(LAUNCHER[0])]
    keys = [word.partition("=")[0].removeprefix(LAUNCHER[1]) for word in settings[len(named) :]]
    texts = {
        name: (compose.conf_dir() / f"hydra/launcher/{name}.yaml").read_text() for name in WORDS
    }
    return [
        name
        for name in named or WORDS
        if all(
            re.search(rf"^ *{key}:", texts[name], re.M) for path in keys for key in path.split(".")
        )
    ]


DOCUMENTED = sorted(documented())
# Of each launcher, every setting that is documented, in one sweep.
SETTINGS = {
    name: tuple(
        dict.fromkeys(
            word
            for settings in DOCUMENTED
            if name in launchers_of(settings)
            for word in settings
            if word != ADDRESS and not word.startswith(LAUNCHER[0])
        )
    )
    for name in WORDS
}


@pytest.mark.parametrize("settings", DOCUMENTED, ids=" ".join)
def test_every_documented_setting_is_one_of_a_launcher(settings: tuple[str, ...]) -> None:
    names = launchers_of(settings)
    assert names
    for name in names:
        pytest.importorskip(f"hydra_plugins.{PACKAGES[name]}")
        words = [f"hydra/launcher={name}", *map(_verbatim, settings)]
        assert compose.load(words).hydra.launcher["_target_"].split(".")[1] == PACKAGES[name]


def test_no_documented_setting_has_two_values() -> None:
    assert DOCUMENTED
    for words in SETTINGS.values():
        keys = [word.partition("=")[0] for word in words]
        assert len(set(keys)) == len(keys)


NEEDS_SLURM = pytest.mark.skipif(
    shutil.which("sbatch") is None or not os.environ.get("SLURM_CONF"),
    reason='no Slurm: eval "$(scripts/one_node_slurm.sh start)" starts one',
)


MARKS = {"submitit_slurm": [NEEDS_SLURM]}


@pytest.fixture(scope="module")
def temporary() -> Iterator[Path]:
    """A short path: Ray puts sockets there, whose names may not be long."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def basic(tmp_path_factory: pytest.TempPathFactory, temporary: Path) -> Path:
    """The sweep by Hydra's basic launcher."""
    folder = tmp_path_factory.mktemp("basic")
    process = cluster.start(folder, *SWEEP, temporary=temporary)
    out, _ = process.communicate()
    assert process.returncode == 0, out
    return folder


@pytest.mark.real  # sweeps of whole processes, and what each launcher starts
@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [pytest.param(name, marks=MARKS.get(name, ())) for name in PACKAGES],
)
def test_every_launcher_leaves_the_same_records(
    launcher: str, basic: Path, temporary: Path, tmp_path: Path
) -> None:
    pytest.importorskip(f"hydra_plugins.{PACKAGES[launcher]}")
    knobs = (*SWEEP, f"hydra/launcher={launcher}", *WORDS[launcher], *SETTINGS[launcher])
    process = cluster.start(tmp_path, *knobs, temporary=temporary)
    out, _ = process.communicate()
    assert process.returncode == 0, out
    if launcher == "submitit_local":  # logs of its jobs lie below the folder that was asked for
        assert any((tmp_path / ELSEWHERE / ".submitit").iterdir())
        assert not (tmp_path / "runs").exists()
        (tmp_path / ELSEWHERE).rename(tmp_path / "runs")
    wanted, found = cluster.records(basic), cluster.records(tmp_path)
    assert set(found) == set(wanted) and len(found) == 8
    for run_id, record in found.items():
        expected = wanted[run_id]
        for field in ("cell_id", "arm", "block", "position", "status", "sweep", "workload_hash"):
            assert record[field] == expected[field]
        assert record["config"]["engine"] == expected["config"]["engine"]
    assert (tmp_path / "reports" / cluster.NAME / "index.html").exists()
    if launcher == "submitit_slurm":
        shutil.rmtree(tmp_path / "runs" / ".submitit")
    assert not list(tmp_path.glob(".*")) and not list(
        tmp_path.glob("*.yaml")
    )  # nothing but what basic leaves
    engines = [line for line in cluster.log(tmp_path) if not line.startswith("measured")]
    assert len(engines) == 4
    for build, close in zip(engines[::2], engines[1::2], strict=True):  # one after the other
        assert build.split()[0] == "build" and close == build.replace("build", "close")


@pytest.mark.real
@pytest.mark.slow
def test_a_ray_cluster_that_runs_takes_the_jobs(temporary: Path, tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_ray_launcher")
    assert any(ADDRESS in settings for settings in DOCUMENTED)
    words = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--port=0"]
    head = subprocess.Popen(
        [*words, "--include-dashboard=false", "--disable-usage-stats", "--num-cpus=2"],
        env={**os.environ, "TMPDIR": str(temporary)},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        started = temporary / "ray" / "ray_current_cluster"
        while not started.exists():
            assert head.poll() is None
            time.sleep(0.1)
        knobs = ("engine.delay_s=0.001,0.002", "hydra/launcher=ray", ADDRESS)
        out, _ = (process := cluster.start(tmp_path, *knobs, temporary=temporary)).communicate()
        assert process.returncode == 0, out
        assert len(cluster.records(tmp_path)) == 2
    finally:
        os.killpg(head.pid, signal.SIGTERM)
        head.wait()


def test_a_job_of_joblib_that_dies_takes_no_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = pytest.importorskip("hydra_plugins.hydra_joblib_launcher._core")
    victim = tmp_path / "victim"

    def job(number: int, *_: object) -> int:
        if number == 1:
            (written := victim.with_suffix(".new")).write_text(str(os.getpid()))
            written.rename(victim)
            os.kill(os.getpid(), signal.SIGKILL)
        while not victim.exists() or psutil.pid_exists(int(victim.read_text())):
            time.sleep(0.01)
        return number

    monkeypatch.setattr(core, "execute_job", job)
    # that of a process of tests may hold what cannot be pickled
    monkeypatch.setattr(launching.Singleton, "get_state", dict)
    first, dead, last = launching._by_joblib(JOBLIB, [[], [], []])
    assert (first, last) == (0, 2) and isinstance(dead, FailedJob)


def test_ctrl_c_ends_the_jobs_of_joblib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = pytest.importorskip("hydra_plugins.hydra_joblib_launcher._core")

    def job(number: int, *_: object) -> None:
        (written := tmp_path / f"new-{number}").write_text(str(os.getpid()))
        written.rename(tmp_path / f"job-{number}")
        time.sleep(3600)

    def interrupt() -> None:
        while len(list(tmp_path.glob("job-*"))) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(core, "execute_job", job)
    # that of a process of tests may hold what cannot be pickled
    monkeypatch.setattr(launching.Singleton, "get_state", dict)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        launching._by_joblib(JOBLIB, [[], []])
    thread.join()
    jobs = [int(path.read_text()) for path in tmp_path.glob("job-*")]
    assert not psutil.wait_procs([psutil.Process(pid) for pid in jobs if psutil.pid_exists(pid)])[1]


@pytest.mark.parametrize(
    ("params", "in_turn", "options"),
    [
        ({}, True, {"exclusive": True}),
        ({"gpus_per_node": None, "cpus_per_task": 8}, True, {"exclusive": True}),
        ({"additional_parameters": {"begin": "now"}}, True, {"exclusive": True, "begin": "now"}),
        ({"additional_parameters": {"exclusive": False}}, True, {}),
        ({"additional_parameters": {"exclusive": "user"}}, True, {"exclusive": "user"}),
        ({}, False, {}),
        ({"additional_parameters": {"exclusive": True}}, False, {"exclusive": True}),
        ({"gpus_per_node": 1}, True, {}),
        ({"gres": "gpu:1", "additional_parameters": None}, True, {}),
        ({"additional_parameters": {"gpus": 1}}, True, {"gpus": 1}),
    ],
)
def test_jobs_of_slurm_that_would_share_a_device_have_a_node_each(
    params: dict[str, Any], in_turn: bool, options: dict[str, Any]
) -> None:
    assert launching._of_sbatch(params, in_turn) == options


@pytest.mark.parametrize(
    ("returned", "states", "queued", "reason"),
    [
        (0, ["RUNNING"], "", None),
        (1, ["RUNNING", "COMPLETING", "COMPLETED"], "COMPLETING", None),
        (1, ["FAILED"], "", None),
        (1, ["RUNNING", "CANCELLED by 1000"], "COMPLETING", "CANCELLED"),
        (1, ["RUNNING"], "TIMEOUT", "TIMEOUT"),
        (1, ["RUNNING"], "RUNNING", None),  # for too long
        ("limit", ["COMPLETED"], "", "TIMEOUT"),
        (None, ["TIMEOUT"], "", "TIMEOUT"),
        (None, ["FAILED"], "", "FAILED"),
        (None, ["UNKNOWN"], "CANCELLED", "CANCELLED"),
        (None, ["PENDING"], "", "Killed"),
        (None, ["FINISHED"], "", "Killed"),
    ],
)
def test_how_a_job_of_submitit_ended(
    returned: object,
    states: list[str],
    queued: str,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever it returned: the scheduler may have ended its worker first."""
    utils = pytest.importorskip("submitit.core.utils")
    unknown, slept = utils.UncompletedJobError("it says nothing"), list[float]()
    value = unknown if returned == "limit" else returned

    class Job:
        job_id, paths = "7_0", SimpleNamespace(stderr="none", stdout="none")

        def done(self) -> bool:
            return states not in (["UNKNOWN"], ["PENDING"])

        def results(self) -> list[Any]:
            assert self.done()
            if returned is None:
                raise unknown
            return [SimpleNamespace(_return_value=value)]

        def get_info(self, mode: str) -> None:
            self.state = states[min(len(slept), len(states) - 1)]

    monkeypatch.setattr(launching, "wait_for", lambda job: None)
    monkeypatch.setattr(launching, "queue_state", lambda job: queued)
    monkeypatch.setattr(
        launching, "time", SimpleNamespace(sleep=slept.append, monotonic=lambda: sum(slept))
    )
    if reason is None:
        assert launching._result(Job())._return_value == value
    else:
        with pytest.raises(LostJob, match=r"^job 7_0 ended") as raised:
            launching._result(Job())
        assert raised.value.state == reason


@pytest.mark.parametrize("in_turn", [True, False])
def test_a_local_job_that_takes_a_device_is_started_when_it_is_free(
    in_turn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time limit runs from its start."""
    submitit = pytest.importorskip("submitit")
    said: list[str] = []

    class Executor:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def update_parameters(self, **_: object) -> None:
            pass

        def submit(self, launcher: object, overrides: list[str], *_: object) -> str:
            said.append(f"start {overrides[0]}")
            return overrides[0]

        def map_array(self, launcher: object, *columns: Any) -> list[str]:
            return [self.submit(launcher, *row) for row in zip(*columns, strict=True)]

    monkeypatch.setattr(submitit, "AutoExecutor", Executor)
    monkeypatch.setattr(launching, "_result", lambda job: said.append(f"end {job}") or job)
    monkeypatch.setattr(launching, "takes_device", lambda overrides: in_turn)
    launcher = SimpleNamespace(_EXECUTOR="local", params={"submitit_folder": "x"})
    assert launching._by_submitit(launcher, [["a"], ["b"]]) == ["a", "b"]
    turns, together = "start a,end a,start b,end b", "start a,start b,end a,end b"
    assert ",".join(said) == (turns if in_turn else together)


def test_ctrl_c_while_jobs_are_submitted_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in the queue already."""
    submitit = pytest.importorskip("submitit")
    path = tmp_path / ".jobs" / "a.json"
    path.parent.mkdir()
    path.touch()

    class Executor:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def update_parameters(self, **_: object) -> None:
            pass

        def map_array(self, *_: object) -> list[Any]:
            os.kill(os.getpid(), signal.SIGINT)
            paths = SimpleNamespace(folder=tmp_path)
            return [SimpleNamespace(job_id="7_0", paths=paths, done=lambda: False)]

    monkeypatch.setattr(submitit, "AutoExecutor", Executor)
    monkeypatch.setattr(launching, "takes_device", lambda overrides: False)
    launcher = SimpleNamespace(_EXECUTOR="slurm", params={"submitit_folder": "x"})
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(JobsContinue, match=r"7_0 go on .* scancel 7 ends them"):
        launching._by_submitit(launcher, [[f"sweep.plan={path}"]])
    assert path.with_suffix(QUEUED).exists() and signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("launcher", "extra"),
    [
        ("ray", "ray"),
        ("joblib", "joblib"),
        ("submitit_slurm", "slurm"),
        ("submitit_local", "slurm"),
    ],
)
def test_a_launcher_that_is_not_installed(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, launcher: str, extra: str
) -> None:
    from hydra.core.plugins import Plugins

    known = Plugins.instance().class_name_to_class
    monkeypatch.setattr(
        Plugins.instance(),
        "class_name_to_class",
        {name: cls for name, cls in known.items() if "_launcher." not in name or "basic" in name},
    )
    done = cli("-m", "cache.block_size=8,16", f"hydra/launcher={launcher}")
    assert done.code == 2
    command = f"pip install -e '.[{extra}]' -c constraints.txt"
    assert done.err == (
        f"error: hydra/launcher={launcher}: its plugin is not installed; {command}\n"
    )
    assert not Path("runs").exists()
