"""task=bench: measurements of one cell, or of one job of a sweep's plan."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from minivllm.bench.display import Display
from minivllm.bench.records import identity
from minivllm.bench.records.lock import run_folder
from minivllm.bench.records.measurement import Measurement
from minivllm.bench.records.storage import RECORD
from minivllm.bench.supervisor import Outcome
from minivllm.bench.supervisor import run as supervise
from minivllm.config.groups import Config
from minivllm.errors import BadInput
from minivllm.experiments import filling
from minivllm.experiments.ending import conclude
from minivllm.experiments.jobs import discard, read_measurements
from minivllm.experiments.preflight import checked_single_run, tracked
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
        return _exit_code(_run_job(Path(sweep.plan)))
    return _run_lone(config)


def _exit_code(outcomes: Sequence[Outcome]) -> int:
    return 0 if all(outcome.status == "ok" for outcome in outcomes) else 1


def _run_job(path: Path) -> list[Outcome]:
    """Measure one job of a plan; the sweeper builds the report.

    What has been recorded since the job was made is left out: a job may have waited in a queue
    while another command measured the same.
    """
    measurements, before, total = read_measurements(path)
    made_ns = path.stat().st_mtime_ns
    todo = [measurement for measurement in measurements if not _recorded(measurement, made_ns)]
    if len(todo) < len(measurements):
        print(f"{len(measurements) - len(todo)} of {len(measurements)} recorded since, skipped")
    for measurement in todo:
        learn(measurement.config)
    with Display(before, total) as display:
        config = todo[0].config if todo else {}
        outcomes = supervise(todo, tracked(display, config))
    discard(path)
    return outcomes


def _recorded(measurement: Measurement, since_ns: int) -> bool:
    """Whether another process has recorded a measurement since then."""
    with suppress(OSError):
        return (measurement.path / RECORD).stat().st_mtime_ns > since_ns
    return False


def _run_lone(config: dict[str, Any]) -> int:
    config, fingerprint = checked_single_run(config, filling=True)
    view = Config.of(config)
    root = Path(view.runs_dir)
    if view.sweep.dry_run:
        from minivllm.experiments.preview import show_lone

        show_lone(_measurements(root, view.name or "<time>", config, fingerprint))
        return 0
    with run_folder(root, view.name) as name:
        if filling.is_auto(config):
            arm = identity.cell_name(config), config, fingerprint
            filled = filling.find([arm], root, name)
            config = filling.with_number(config, filled.num_requests)
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
