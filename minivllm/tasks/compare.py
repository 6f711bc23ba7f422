"""task=compare: did anything get slower from one run to another?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minivllm.analysis.format import count
from minivllm.analysis.metric import find_metric
from minivllm.errors import BadInput
from minivllm.experiments.ending import list_reports
from minivllm.tasks.report import find_runs, joined_name


def run(config: dict[str, Any]) -> int:
    """Compare the cells that two runs share; print a table, and write it with a plot below
    `reports_dir`.

    Args:
        config: the resolved configuration; uses `task.metric` (None: what ranks), `task.threshold`
            and `task.margin`, `runs` (two folders or globs, the one to compare with first),
            `runs_dir`, `reports_dir` and `name`.

    Returns:
        0 no regression, 1 a regression, 3 undecided or not comparable.

    Raises:
        BadInput: `runs` does not name two, one of them has no records, there is no such metric, or
            nothing can be written there.
    """
    task, runs = config["task"], config["runs"]
    if task["metric"] is not None:
        find_metric(task["metric"], "task.metric")
    if len(runs) != 2:
        raise BadInput(
            f"runs={runs}: name two runs to compare, the older first, e.g. 'runs=[before,after]'"
        )
    folders = [find_runs([pattern], Path(config["runs_dir"])) for pattern in runs]

    from minivllm.analysis.comparison import compare
    from minivllm.analysis.rows import read_rows
    from minivllm.report.studies.comparison import (
        MEANS,
        ComparedRuns,
        busy,
        comparison_table,
        write,
    )
    from minivllm.report.terminal import print_table
    from minivllm.report.writing import make_folder

    names = joined_name(folders[0]), joined_name(folders[1])
    (before, lost_before), (after, lost_after) = (read_rows(folder) for folder in folders)
    if lost := [*lost_before, *lost_after]:
        print(
            f"not comparable: {count(len(lost), 'unreadable record')}, such as {lost[0]}: "
            "measure again or remove"
        )
        return 3
    reports_dir = Path(config["reports_dir"])
    out_dir = reports_dir / str(config["name"] or f"{names[1]}-against-{names[0]}")
    make_folder(out_dir)  # before the work
    comparison = compare(before, after, task["metric"], task["threshold"], task["margin"])
    page = write(ComparedRuns(comparison, names, (before, after)), out_dir)
    list_reports(reports_dir)
    if comparison.cells:
        print_table(comparison_table(comparison))
        print(MEANS)
        for note in comparison.notes:
            print(note)
    for name, labels in zip(names, (comparison.only_before, comparison.only_after), strict=True):
        if labels:
            print(f"only in {name}: {'; '.join(labels)}")
    print(comparison.conclusion)
    for line in busy(names, (before, after)):
        print(line)
    print(f"comparison: {page}")
    return comparison.exit_code
