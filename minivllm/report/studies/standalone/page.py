"""A page of one study by itself: of a record of its own kind, or of two runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minivllm.report.figures.opening import NAME as OPENING
from minivllm.report.figures.render import finish, finish_opening
from minivllm.report.html import (
    Front,
    Section,
    make_folder,
    page,
    write_bytes,
    write_or_remove,
)
from minivllm.report.inputs import ReportInputs
from minivllm.report.sections import commands, newest
from minivllm.report.studies.base import Result, Study


def write_alone(
    study: Study[Result],
    result: Result,
    inputs: ReportInputs,
    out_dir: Path,
    *,
    names: str,
    subject: tuple[str, list[tuple[str, Any]]],
    command: str = Front.command,
) -> Path:
    """Write index.html, a PNG a figure, and the study's files.

    Args:
        study, result, inputs: what the page is of.
        out_dir: where to write.
        names: of the runs.
        subject: heading of the section that says what was measured, and its facts.
        command: what writes the page again.

    Returns:
        The path of index.html.

    Raises:
        BadInput: nothing can be written there.
    """
    make_folder(out_dir)
    plots = {one.name: finish(one) for one in study.figures(result, inputs) if one is not None}
    drawn = study.picture(result, inputs)
    picture = None if drawn is None else finish_opening(drawn)
    own = [*plots.values()]
    if picture is not None:
        plots[picture.name] = picture
    for name in (OPENING, *study.figure_names):
        write_or_remove(out_dir / f"{name}.png", plots[name].png if name in plots else b"")
    for name, text in study.files(result, inputs).items():
        write_bytes(out_dir / name, text.encode())
    title, facts = subject
    parts = [
        Section(
            study.name,
            study.title,
            study.section(result, inputs, own, out_dir),
            study.template,
        ),
        Section("subject", title, {"facts": facts, "commands": commands(inputs.rows)}),
    ]
    front = Front(
        study.question(result, inputs),
        names,
        study.conclusion(result, inputs),
        picture,
        newest(inputs.rows),
        command=command,
    )
    index = out_dir / "index.html"
    write_bytes(index, page(front, parts, plots).encode())
    return index
