"""Launching of jobs whose results are collected one by one.

Hydra's launchers for submitit and Ray raise the first job's error, and lose the results of all
others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, setup_globals
from hydra.plugins.launcher import Launcher
from omegaconf import OmegaConf, open_dict

from minivllm.experiments.jobs import FailedJob, JobsContinue, LostJob, mark_queued
from minivllm.platform.files import log_tail

Overrides = Sequence[Sequence[str]]
Return = JobReturn | FailedJob
EXECUTORS = ("max_num_timeout",)  # settings of submitit's executor, not of its jobs
# States of submitit's that are no reason.
UNKNOWN = ("", "COMPLETED", "FINISHED", "INTERRUPTED", "NO", "UNKNOWN")


def launch(launcher: Launcher, jobs: Overrides) -> Sequence[Return]:
    """Run jobs, given as overrides; one that failed is a FailedJob in its place.

    Raises:
        JobsContinue: the command was interrupted, and the jobs go on.
        Exception: no job could be started; or of other launchers: one of the jobs failed.
    """
    kind = type(launcher).__module__.split(".")[1]
    if kind == "hydra_submitit_launcher":
        return _by_submitit(launcher, jobs)
    if kind == "hydra_ray_launcher":
        return _by_ray(launcher, jobs)
    returned: Sequence[Return] = launcher.launch(jobs, initial_job_idx=0)
    return returned


def _collected(waits: Iterable[Callable[[], JobReturn]]) -> list[Return]:
    """The result of each job, or its error."""
    returns: list[Return] = []
    for wait in waits:
        try:
            returns.append(wait())
        except Exception as error:
            returns.append(FailedJob(error))
    return returns


def _by_submitit(launcher: Any, jobs: Overrides) -> list[Return]:
    """As the launcher does, but for the collection; and Ctrl-C names jobs of Slurm that go on."""
    import submitit

    from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf

    cluster, params = launcher._EXECUTOR, launcher.params
    init = {f"{cluster}_{name}": params[name] for name in EXECUTORS if name in params}
    executor = submitit.AutoExecutor(params["submitit_folder"], cluster=cluster, **init)
    common = set(OmegaConf.structured(BaseQueueConf).keys())
    executor.update_parameters(
        **{
            name if name in common else f"{cluster}_{name}": value
            for name, value in params.items()
            if name not in (*EXECUTORS, "submitit_folder")
        }
    )
    logging.getLogger("submitit").addFilter(_Once())
    state = Singleton.get_state()
    arguments = [
        (list(overrides), "hydra.sweep.dir", number, f"job_id_for_{number}", state)
        for number, overrides in enumerate(jobs)
    ]
    submitted = executor.map_array(launcher, *zip(*arguments, strict=True))
    if cluster == "slurm":
        for overrides in jobs:
            mark_queued(overrides)
    try:
        return _collected(partial(_result, job) for job in submitted)
    except KeyboardInterrupt:
        going = [job.job_id for job in submitted if not job.done()]
        if cluster != "slurm" or not going:
            raise
        arrays = dict.fromkeys(name.partition("_")[0] for name in going)
        raise JobsContinue(
            f"jobs {', '.join(going)} go on and write their records; scancel "
            f"{' '.join(arrays)} ends them"
        ) from None


def _result(job: Any) -> JobReturn:
    """What a job of submitit returned.

    Raises:
        LostJob: it ended without a result.
        Exception: the job raised it.
    """
    from submitit.core.utils import UncompletedJobError

    try:
        result: JobReturn = job.results()[0]
    except UncompletedJobError as error:
        state = str(job.state).partition(" ")[0]  # CANCELLED by 1000
        known = state.isupper() and state not in UNKNOWN
        ended = f"ended as {state}" if known else "ended without a result, as one that was killed"
        tail = log_tail(Path(job.paths.stderr)) or log_tail(Path(job.paths.stdout))
        raise LostJob(state if known else "Killed", f"job {job.job_id} {ended}", tail) from error
    return result


class _Once(logging.Filter):
    """Lets through a warning once; submitit gives one at each poll."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage().partition(" - ")[2] or record.getMessage()
        seen = text in self._seen
        self._seen.add(text)
        return not seen or record.levelno < logging.WARNING


def _by_ray(launcher: Any, jobs: Overrides) -> list[Return]:
    """As the launcher does, but for the collection."""

    from hydra_plugins.hydra_ray_launcher._launcher_util import launch_job_on_ray, start_ray

    setup_globals()
    launcher.ray_cfg.init.setdefault("object_store_memory", 78643200)
    start_ray(launcher.ray_cfg.init)
    runs = []
    for number, overrides in enumerate(jobs):
        config = launcher.hydra_context.config_loader.load_sweep_config(
            launcher.config, list(overrides)
        )
        with open_dict(config):
            config.hydra.job.id, config.hydra.job.num = f"job_id_for_{number}", number
        runs.append(
            launch_job_on_ray(
                launcher.hydra_context,
                launcher.ray_cfg.remote,
                config,
                launcher.task_function,
                Singleton.get_state(),
            )
        )
    return _collected(partial(_ray_result, run) for run in runs)


def _ray_result(run: Any) -> JobReturn:
    """What a job of Ray returned; raises what it raised."""
    import ray

    result: JobReturn = ray.get(run)
    return result
