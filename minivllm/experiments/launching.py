"""Launching of jobs whose results are collected one by one.

Hydra's launchers for joblib, submitit and Ray raise the first job's error, and lose the results of
all others.

A scheduler's time limit runs while a job waits for another job's device. So jobs that take one are
started when it is free: those of submitit's local form one after the other, and those of Slurm that
reserve no GPU on a node of their own.
"""

from __future__ import annotations

import logging
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, setup_globals
from hydra.plugins.launcher import Launcher
from omegaconf import OmegaConf, open_dict

from minivllm.experiments.jobs import (
    FailedJob,
    JobsContinue,
    LostJob,
    mark_queued,
    queue_state,
    takes_device,
    wait_for,
)
from minivllm.platform.files import log_tail

Overrides = Sequence[Sequence[str]]
Return = JobReturn | FailedJob
EXECUTORS = ("max_num_timeout",)  # settings of submitit's executor, not of its jobs
FINAL_S = 30.0  # in which a scheduler knows that a job with a result has ended
GOING_ON = ("COMPLETING", "PENDING", "RUNNING")
# States of submitit's that are no reason.
UNKNOWN = ("", "COMPLETED", "FINISHED", "INTERRUPTED", "NO", "UNKNOWN")


def launch(launcher: Launcher, jobs: Overrides) -> Sequence[Return]:
    """Run jobs, given as overrides; one that failed is a FailedJob in its place.

    Raises:
        JobsContinue: the command was interrupted, and the jobs go on.
        Exception: no job could be started; or of other launchers: one of the jobs failed.
    """
    kind = type(launcher).__module__.split(".")[1]
    if kind == "hydra_joblib_launcher":
        return _by_joblib(launcher, jobs)
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
    in_turn = any(map(takes_device, jobs))
    if cluster == "slurm":
        params = {**params, "additional_parameters": _of_sbatch(params, in_turn)}
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
    if cluster == "local" and in_turn:
        return _collected(partial(_submitted_result, executor, launcher, one) for one in arguments)
    submitted: list[Any] = []
    try:
        with _uninterrupted():  # else nobody would know of jobs that are in the queue
            submitted = executor.map_array(launcher, *zip(*arguments, strict=True))
            if cluster == "slurm":
                for overrides, job in zip(jobs, submitted, strict=True):
                    mark_queued(overrides, job)
        return _collected(partial(_result, job) for job in submitted)
    except KeyboardInterrupt:
        going = [job.job_id for job in submitted if not job.done()]
        if cluster != "slurm" or not going:
            raise
        raise JobsContinue.of(going) from None


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Put off Ctrl-C and SIGTERM to the end of the block, where they raise KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():  # which signals do not reach
        yield
        return
    caught: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda one, _: caught.append(one)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        if caught:
            raise KeyboardInterrupt


def _of_sbatch(params: dict[str, Any], in_turn: bool) -> dict[str, Any]:
    """sbatch's options beside submitit's own: a node for each job that would wait for another's
    device there. An option that is false is left out.

    Args:
        params: of the launcher.
        in_turn: whether jobs take a device.
    """
    own = params.get("additional_parameters") or {}
    options = {**params, **own}
    has_gpu = any(options[name] for name in options if "gpu" in name or name == "gres")
    options = {"exclusive": True, **own} if in_turn and not has_gpu else own
    return {name: value for name, value in options.items() if value is not False}


def _submitted_result(executor: Any, launcher: Any, arguments: Sequence[Any]) -> JobReturn:
    return _result(executor.submit(launcher, *arguments))


def _result(job: Any) -> JobReturn:
    """What a job of submitit returned.

    Raises:
        LostJob: it ended without a result.
        Exception: the job raised it.
    """
    from submitit.core.utils import UncompletedJobError

    wait_for(job)
    try:
        if not job.done():  # for which results() would wait
            raise UncompletedJobError("accounting does not know it")
        result: JobReturn = job.results()[0]
    except UncompletedJobError as error:
        state = _reason(job)
        ended = f"ended as {state}" if state else "ended without a result, as one that was killed"
        raise LostJob(state or "Killed", f"job {job.job_id} {ended}", _tail(job)) from error
    if isinstance(result._return_value, UncompletedJobError):  # raised at the warning of the limit
        raise LostJob("TIMEOUT", f"job {job.job_id} ended as its time limit came near", _tail(job))
    if result._return_value and (state := _reason(job)) not in ("", "FAILED"):
        # Its worker may have been ended first, and the job has recorded that.
        raise LostJob(state, f"job {job.job_id} ended as {state}", _tail(job))
    return result


def _reason(job: Any) -> str:
    """The scheduler's word for why a job of submitit has ended; "" where it has none."""
    end = time.monotonic() + FINAL_S
    while True:
        job.get_info(mode="force")
        state = str(job.state).partition(" ")[0]  # CANCELLED by 1000
        if state in ("UNKNOWN", *GOING_ON):  # accounting is late, or does not know it
            state = queue_state(job)
        if state not in GOING_ON or time.monotonic() > end:
            return state if state.isupper() and state not in (*UNKNOWN, *GOING_ON) else ""
        time.sleep(1.0)


def _tail(job: Any) -> str:
    return log_tail(Path(job.paths.stderr)) or log_tail(Path(job.paths.stdout))


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


def _by_joblib(launcher: Any, jobs: Overrides) -> list[Return]:
    """As the launcher does, but each job has a process of its own: in a common pool one that dies
    takes the others with it."""
    from joblib import Parallel, delayed
    from joblib.externals import cloudpickle
    from joblib.externals.loky import ProcessPoolExecutor

    from hydra_plugins.hydra_joblib_launcher._core import execute_job, process_joblib_cfg

    settings = dict(launcher.joblib)
    process_joblib_cfg(settings)
    state = Singleton.get_state()
    running: set[ProcessPoolExecutor] = set()
    pickling = threading.Lock()  # cloudpickle is for one thread at a time

    def result(number: int, overrides: Sequence[str]) -> Return:
        common = launcher.hydra_context, launcher.config, launcher.task_function, state
        with pickling:
            job = cloudpickle.dumps(partial(execute_job, number, overrides, *common))
        process = ProcessPoolExecutor(1)
        running.add(process)
        try:
            return cast(JobReturn, process.submit(_unpickled, job).result())
        except Exception as error:
            return FailedJob(error)
        finally:
            process.shutdown()
            running.discard(process)

    try:
        returns: list[Return] = Parallel(**{**settings, "backend": "threading"})(
            delayed(result)(number, overrides) for number, overrides in enumerate(jobs)
        )
    finally:
        for process in [*running]:  # after Ctrl-C
            process.shutdown(kill_workers=True)
    return returns


def _unpickled(job: bytes) -> Any:
    return pickle.loads(job)()


def _by_ray(launcher: Any, jobs: Overrides) -> list[Return]:
    """As the launcher does, but for the collection."""

    from hydra_plugins.hydra_ray_launcher._launcher_util import launch_job_on_ray, start_ray

    setup_globals()
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
