"""Sweeps over tasks without records: every combination runs, and each job receives its secrets
privately."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from minivllm.bench.records import identity
from minivllm.config.groups import Config
from minivllm.config.overrides import hidden, quoted
from minivllm.errors import BadInput
from minivllm.experiments.jobs import go_to, job_files, read_job
from minivllm.experiments.plan import Sweep
from minivllm.experiments.schedule import PlannedArm
from minivllm.redaction import learn

Launch = Callable[[Sequence[Sequence[str]]], Sequence[Any]]

RECORDING = ("minivllm.tasks.bench.run", identity.QUALITY_TASK)  # tasks that write records


def launch_all(cells: Sequence[PlannedArm], sweep: Sweep, launch: Launch) -> int:
    """Run every valid arm, and print the failures.

    A launcher may store its overrides, so secrets are masked in them; while the jobs run, private
    files hold the configurations with secrets.

    Args:
        cells: the arms.
        sweep: the settings of the sweep.
        launch: see `run_sweep`.

    Returns:
        The exit code: 0 if all succeeded, 2 if all failures were bad input, else 1.

    Raises:
        BadInput: there are secrets and the private files cannot be written.
    """
    for cell in cells:
        if cell.problem is not None:
            print(f"error: {cell.arm.name}: {cell.problem}", file=sys.stderr)
    valid = [cell for cell in cells if cell.config is not None]
    codes = [2] * (len(cells) - len(valid))
    if len(valid) > 1:  # each prints what it finds, and not what it is
        names = "; ".join(cell.arm.name for cell in valid)
        print(f"{len(valid)} combinations, in this order: {names}", file=sys.stderr)
    with _overrides(valid, sweep) as jobs:
        for job in launch(jobs):
            try:
                codes.append(int(job.return_value or 0))
            except Exception as error:
                print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
                codes.append(1)
    return 0 if not any(codes) else 2 if all(code in (0, 2) for code in codes) else 1


@contextmanager
def _overrides(cells: Sequence[PlannedArm], sweep: Sweep) -> Iterator[list[list[str]]]:
    """The overrides of each arm's job, without secrets; the private files exist while the context
    is open."""
    whole = [[*cell.arm.overrides, *sweep.settings] for cell in cells]
    public = [[hidden(text) for text in job] for job in whole]
    if public == whole:
        yield whole
        return
    configs = [{"config": cell.config} for cell in cells]
    folder = Path(cells[0].config["runs_dir"] if cells[0].config else ".").absolute()
    new_folders = [place for place in (folder, *folder.parents) if not place.exists()]
    with ExitStack() as kept:
        kept.callback(_remove_empty, new_folders)
        try:
            paths = kept.enter_context(job_files(folder, configs))
        except OSError as error:
            raise BadInput(
                f"runs_dir={folder}: the files of the jobs' secrets cannot be written "
                f"({error.strerror or error})"
            ) from None
        yield [
            [*job, f"sweep.plan={quoted(str(path))}"]
            for job, path in zip(public, paths, strict=True)
        ]


def _remove_empty(folders: Sequence[Path]) -> None:
    with suppress(OSError):
        for folder in folders:
            os.rmdir(folder)  # fails on purpose unless empty


def settings_of_job(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a job with its secrets, which the file `sweep.plan` has, if it names
    one; this process goes to the folder of the sweep's command.

    Raises:
        BadInput: the file cannot be read, or this host does not have the folder.
    """
    sweep = Config.of(config).sweep
    if sweep.plan is None:
        return config
    if sweep.cwd:
        go_to(sweep.cwd)
    content = read_job(Path(sweep.plan))
    whole = content.get("config")
    if whole is None:  # a job that measures
        return config
    learn(whole)
    return cast(dict[str, Any], whole)
