"""A page: a conclusion, then sections, each shown by a template; self-contained, with every script
that it needs. Files of a report appear whole or not at all."""

from __future__ import annotations

import base64
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.analysis.format import sig
from minivllm.errors import BadInput
from minivllm.platform import files
from minivllm.report.figures.palette import ON_DARK
from minivllm.report.figures.render import Plot
from minivllm.report.notices import Notice

if TYPE_CHECKING:
    from jinja2 import Environment

MAKER = "minivllm"  # in the head of every page


@dataclass(frozen=True)
class Conclusion:
    """What was found: the headline of a page, and the lines below it, each a plain sentence."""

    headline: str
    lines: list[str]


@dataclass(frozen=True)
class Section:
    """One part of a page: what its template shows as `data`. A section of no data is left out."""

    id: str
    title: str
    data: Any
    template: str = ""  # name of its file in templates/sections; the id if it is empty

    def __post_init__(self) -> None:
        object.__setattr__(self, "template", self.template or self.id)


@dataclass(frozen=True)
class Front:
    """What stands above the sections of a page.

    Args:
        title: of the whole page.
        names: of the runs.
        conclusion: what was found.
        picture: shows the headline, beside it; None where nothing does.
        date: of the newest record, e.g. "2026-11-25 00:33"; "" where none says.
        notices: what is to be known before any figure.
        command: what writes the page again.
    """

    title: str
    names: str
    conclusion: Conclusion
    picture: Plot | None = None
    date: str = ""
    notices: Sequence[Notice] = ()
    command: str = "task=report 'runs=[...]'"


def page(front: Front, parts: Sequence[Section], plots: Mapping[str, Plot]) -> str:
    """The page as HTML, of parts that know where it will lie, for their links to the records."""
    from minivllm.report.figures.live import charts, library

    live = [(plot.name, plot.live) for plot in plots.values() if plot.live]
    return render(
        "report.html.j2",
        front=front,
        sections=[part for part in parts if part.data],
        charts=charts(live) if live else "",
        library=library() if live else "",
    )


def render(template: str, **context: Any) -> str:
    """A template of this package; everything that is put into it is escaped."""
    return str(_environment().get_template(template).render(context))


@cache
def _environment() -> Environment:
    """What templates are compiled in, once in a process."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup, escape

    environment = Environment(
        loader=PackageLoader("minivllm.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["sig"] = sig
    environment.filters["code"] = lambda text: Markup(
        re.sub("`(.+?)`", r"<code>\1</code>", str(escape(text)))
    )
    environment.filters["foldable"] = lambda name: Markup(str(escape(name)).replace(".", ".<wbr>"))
    environment.filters["breakable"] = lambda name: Markup(str(escape(name)).replace("+", "+<wbr>"))
    environment.filters["themed"] = lambda colour: (
        f"var(--c{colour[1:]})" if colour in ON_DARK else colour
    )
    environment.filters["data_uri"] = lambda data, kind: (
        f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    )
    environment.globals.update(on_dark=ON_DARK, maker=MAKER)
    return environment


def make_folder(out_dir: Path) -> None:
    """Make the folder of a report, or of what is written beside it.

    Raises:
        BadInput: it cannot be made, or nothing can be written into it.
    """
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out_dir):
            pass
    except OSError as error:
        raise BadInput(
            f"reports_dir={out_dir.parent}: {out_dir} cannot be written to ({error})"
        ) from None


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file that can be made again after a power cut."""
    files.write_bytes(path, data, durable=False)


def write_or_remove(path: Path, data: bytes) -> None:
    """Write a file of a report, or remove that of an earlier one where there is nothing to
    write."""
    if data:
        write_bytes(path, data)
    else:
        path.unlink(missing_ok=True)
