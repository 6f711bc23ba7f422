"""task=report: the report of existing records, built again."""

from __future__ import annotations

import glob
import sys
from pathlib import Path
from typing import Any

from minivllm.bench.records import archive
from minivllm.bench.records.storage import KERNELS, RECORD
from minivllm.config.groups import Config
from minivllm.errors import BadInput
from minivllm.experiments.ending import list_reports, percentiles
from minivllm.platform.options import KEPT_FOLDERS
from minivllm.platform.processes.process_pool import ProcessPool
from minivllm.platform.untrusted import place

MAX_NAME = 80


def run(config: dict[str, Any]) -> int:
    """Build the report of `runs` and print its path; each run of task=kernels has its own report.

    Args:
        config: the resolved configuration; uses `runs` (folders, archives or globs, also relative
            to `runs_dir`), `runs_dir`, `reports_dir`, `report` and `name`.

    Returns:
        0.

    Raises:
        BadInput: `runs` is empty, a pattern matches no records, `reports_dir` cannot be written to,
            or `name` is given for several reports.
    """
    view = Config.of(config)
    folders = find_runs(view.runs, Path(view.runs_dir))
    reports_dir, name = Path(view.reports_dir), view.name
    timed = [folder for folder in folders if (folder / KERNELS).exists()]
    measured = [folder for folder in folders if folder not in timed]
    if name and len(timed) + bool(measured) > 1:
        raise BadInput(f"name={name} is for one report; a run of task=kernels has its own")
    from minivllm.report.inputs import read
    from minivllm.report.page import write_report
    from minivllm.report.studies.listed import configured
    from minivllm.report.studies.standalone import kernels

    if measured:
        studies = configured(config)
        with ProcessPool() as pool:
            inputs = read(measured, requested=percentiles(config), pool=pool)
            page = write_report(inputs, reports_dir / str(name or joined_name(measured)), studies)
            if inputs.warning:
                print(f"warning: {inputs.warning}", file=sys.stderr)
        print(f"report: {page}")
    for folder in timed:
        out_dir = reports_dir / str(name or joined_name([folder]))
        try:
            print(f"table and plot: {kernels.write(kernels.read(folder), out_dir)}")
        except BadInput as error:
            if len(folders) == 1:
                raise
            print(f"warning: left out: {error}", file=sys.stderr)
    list_reports(reports_dir)
    return 0


def find_runs(patterns: list[str] | str, runs_dir: Path) -> list[Path]:
    """Folders and archives that match the patterns, each once; a pattern is tried from the working
    directory, then from `runs_dir`. Raises BadInput where one matches nothing."""
    patterns = [patterns] if isinstance(patterns, str) else patterns
    if not patterns:
        raise BadInput(
            f"runs is empty: name the records, such as 'runs=[{runs_dir}/<name>]' "
            f"or 'runs=[\"{runs_dir}/*\"]'"
        )
    runs: list[Path] = []
    for pattern in (str(place(pattern, f"runs={pattern}")) for pattern in map(str, patterns)):
        matches = _matches(Path(), pattern) or _matches(runs_dir, pattern)
        if not matches:
            places = dict.fromkeys((pattern, str(runs_dir / pattern)))  # one, if it is absolute
            raise BadInput(f"runs: no records at {' nor at '.join(places)}; {_available(runs_dir)}")
        runs += [path for path in matches if path not in runs]
    return runs


def _matches(folder: Path, pattern: str) -> list[Path]:
    """Folders and archives with records in `folder` that match a name or a pattern."""
    if _holds_records(folder / pattern):
        return [folder / pattern]
    names = glob.glob(str(Path(glob.escape(str(folder))) / pattern))
    return sorted(path for name in names if _holds_records(path := Path(name)))


def _holds_records(folder: Path) -> bool:
    return archive.is_archive(folder) or any(
        next(folder.glob(name), None)
        for name in (KERNELS, *(d + RECORD for d in ("", "*/", "*/*/")))
    )


def _available(runs_dir: Path) -> str:
    places = (p for p in runs_dir.glob("*") if p.name not in KEPT_FOLDERS and _holds_records(p))
    names = sorted((p.name for p in places), reverse=True)
    if not names:
        return f"{runs_dir} holds no records yet: run a benchmark first"
    return f"{runs_dir} has {', '.join(names[:5])}" + (
        f" and {len(names) - 5} more" if len(names) > 5 else ""
    )


def joined_name(folders: list[Path]) -> str:
    """The name of a report: that of its folder or archive, or those of several joined."""
    names = [folder.resolve().name.removesuffix(archive.SUFFIX) for folder in folders]
    name = "+".join(names)
    return name if len(name) <= MAX_NAME else f"{names[0]}+{len(folders) - 1}-more"
