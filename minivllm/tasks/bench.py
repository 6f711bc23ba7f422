"""task=bench: measurements of one cell, or of one job of a sweep's plan."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minivllm.bench.display import Display
from minivllm.bench.records import identity
from minivllm.bench.records.folder_lock import run_folder
from minivllm.bench.records.measurement import Measurement
from minivllm.bench.supervisor import Outcome
from minivllm.bench.supervisor import run as supervise
from minivllm.config.typed import Config
from minivllm.errors import BadInput
from minivllm.experiments.ending import conclude, require_writable_reports
from minivllm.experiments.preflight import (
    check,
    require_hardware,
    tracked,
    validate_single_run,
)
from minivllm.platform import files
from minivllm.platform.untrusted import MAX_TEXT, read_json
from minivllm.redaction import learn


def run(config: dict[str, Any]) -> int:
    """Measure; a single run also prints a summary and builds the report.

    Args:
        config: the resolved configuration.

    Returns:
        0 if every measurement is ok and the report was built, else 1.

    Raises:
        BadInput: the configuration cannot be measured; nothing is written.
        KeyboardInterrupt: Ctrl-C; finished measurements are kept, and a single run reports them.
    """
    sweep = Config.of(config).sweep
    if sweep.plan:
        if sweep.cwd:
            _go_to(sweep.cwd)
        return _exit_code(_run_job(Path(sweep.plan), sweep.job or 0))
    return _run_lone(config)


def _exit_code(outcomes: Sequence[Outcome]) -> int:
    return 0 if all(outcome.status == "ok" for outcome in outcomes) else 1


def _go_to(folder: str) -> None:
    """Change to the folder of the sweep's command, which relative paths refer to; a launcher may
    start its jobs in another one."""
    try:
        os.chdir(folder)
    except OSError as error:
        raise BadInput(
            f"{socket.gethostname()} has no folder {folder} ({error.strerror}): jobs need the "
            "folder that the sweep was started in, and its runs_dir, under the same path"
        ) from None


def _run_job(path: Path, job: int) -> list[Outcome]:
    """Measure one job of a plan; the sweeper builds the report."""
    try:
        whole = files.private(path)  # exists where configurations have secrets
        there = whole if whole.exists() else path
        plan = read_json(there, str(there), limit=MAX_TEXT)
        entries = plan if isinstance(plan, list) else plan["jobs"]
        jobs = [[Measurement.from_dict(item) for item in items] for items in entries]
        measurements = jobs[job]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise BadInput(
            f"sweep.plan={path}, sweep.job={job}: no such job can be read ({error})"
        ) from error
    before, total = sum(map(len, jobs[:job])), sum(map(len, jobs))
    for measurement in measurements:
        learn(measurement.config)
    with Display(before, total) as display:
        config = measurements[0].config if measurements else {}
        return supervise(measurements, tracked(display, config))


def _run_lone(config: dict[str, Any]) -> int:
    validate_single_run(config, allowed=("dry_run",))
    require_hardware(config)
    require_writable_reports(config)
    config, fingerprint, warnings = check(config)
    view = Config.of(config)
    root = Path(view.runs_dir)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    if view.sweep.dry_run:
        from minivllm.experiments.preview import show_lone

        show_lone(_measurements(root, view.name or "<time>", config, fingerprint))
        return 0
    with run_folder(root, view.name) as name:
        return _measure_into(root, name, config, fingerprint)


def _measurements(
    root: Path, name: str, config: dict[str, Any], fingerprint: str
) -> list[Measurement]:
    return identity.expand(config, name, identity.cell_name(config), root, fingerprint)


def _measure_into(root: Path, name: str, config: dict[str, Any], fingerprint: str) -> int:
    """Measure a single run into its folder and report it; returns the exit code."""
    measurements = _measurements(root, name, config, fingerprint)
    code, reported, rejected = 1, False, False
    try:
        with Display() as display:
            code = _exit_code(supervise(measurements, tracked(display, config), lone=True))
    except BadInput:
        rejected = True
        raise
    finally:
        if not rejected:
            out_dir = Path(Config.of(config).reports_dir) / name
            reported = conclude(root / name, out_dir, config) is not None
    return code or int(not reported)
