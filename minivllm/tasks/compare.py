"""task=compare: whether the second of two runs is slower than the first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.analysis.format import count
from minivllm.analysis.metric import find_metric
from minivllm.config.groups import Config
from minivllm.errors import BadInput
from minivllm.experiments.ending import list_reports
from minivllm.tasks.report import find_runs, joined_name

if TYPE_CHECKING:
    from minivllm.report.studies.standalone.comparison import ComparedRuns


def run(config: dict[str, Any]) -> int:
    """Compare the cells that two runs share, and write a table and a plot below `reports_dir`.

    Args:
        config: the resolved configuration; uses `task.metric` (None: the metric of the ranking),
            `task.threshold` and `task.margin`, `runs` (two folders or globs, the baseline first),
            `runs_dir`, `reports_dir` and `name`.

    Returns:
        0 no regression, 1 a regression, 3 undecided or not comparable.

    Raises:
        BadInput: `runs` does not name two runs, one of them has no records, no metric has that
            name, or `reports_dir` cannot be written to.
    """
    view = Config.of(config)
    task, runs = view.task, view.runs
    if task.metric is not None:
        find_metric(task.metric, "task.metric")
    if len(runs) != 2:
        raise BadInput(
            f"runs={runs}: name two runs to compare, the older first, e.g. 'runs=[before,after]'"
        )
    folders = [find_runs([pattern], Path(view.runs_dir)) for pattern in runs]

    from minivllm.analysis.comparison import compare
    from minivllm.analysis.rows import read_rows
    from minivllm.report.html import make_folder
    from minivllm.report.studies.standalone.comparison import ComparedRuns, write

    names = joined_name(folders[0]), joined_name(folders[1])
    (before, lost_before), (after, lost_after) = (read_rows(folder) for folder in folders)
    if lost := [*lost_before, *lost_after]:
        print(
            f"not comparable: {count(len(lost), 'unreadable record')}, such as {lost[0]}: "
            "measure again or remove"
        )
        return 3
    reports_dir = Path(view.reports_dir)
    out_dir = reports_dir / str(view.name or f"{names[1]}-against-{names[0]}")
    make_folder(out_dir)  # first, so that an unwritable folder costs no work
    comparison = compare(before, after, task.metric, task.threshold, task.margin)
    compared = ComparedRuns(comparison, names, (before, after))
    page = write(compared, out_dir)
    list_reports(reports_dir)
    _print(compared)
    print(f"comparison: {page}")
    return comparison.exit_code


def _print(compared: ComparedRuns) -> None:
    """Print the table, its notes and the conclusion."""
    from minivllm.report.studies.standalone.comparison import MEANS, busy, comparison_table
    from minivllm.report.terminal import print_table

    comparison, names = compared.comparison, compared.names
    if comparison.cells:
        print_table(comparison_table(comparison))
        print(MEANS)
        for note in comparison.notes:
            print(note)
    for name, labels in zip(names, (comparison.only_before, comparison.only_after), strict=True):
        if labels:
            print(f"only in {name}: {'; '.join(labels)}")
    print(comparison.conclusion)
    for line in busy(names, compared.sides):
        print(line)
