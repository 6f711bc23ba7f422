"""Tables in the terminal: no figure of them is ever cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Column, Table

BETWEEN = 2  # spaces from one column of a `bare_table` to the next
LEAST_NAME = 10  # characters a line of a name or its heading, however narrow the terminal


def bare_table(*columns: Column | str) -> Table:
    """An empty table that takes little width: no edges, and two spaces between columns."""
    from rich import box
    from rich.table import Table

    return Table(
        *columns,
        header_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )


def rich_table(names: list[str], figures: list[tuple[str, str]], status: str = "status") -> Table:
    """An empty table of results: names, which may be folded, the status, and figures (title, unit),
    which may not."""
    from rich.table import Column

    return bare_table(
        *(
            Column(title.replace(".", ".\n"), overflow="fold", min_width=LEAST_NAME)
            for title in names
        ),
        Column(status, min_width=7),
        *(
            Column(f"{title}\n{unit}" if unit else title, justify="right", no_wrap=True)
            for title, unit in figures
        ),
    )


def print_table(table: Table, console: Console | None = None) -> None:
    """Print a table and an empty line.

    A terminal too narrow for all figures gets those that fit, and names the others. A file or
    a pipe has no width and gets each row in one line.
    """
    from rich.console import Console
    from rich.measure import Measurement

    console = console or Console(highlight=False)
    left_out: list[str] = []
    if console.is_terminal:
        while table.columns[-1].no_wrap and _least_width(table, console) > console.width:
            left_out.insert(0, str(table.columns.pop().header).split("\n")[0])
    else:
        unbounded = console.options.update(max_width=100_000)
        console.width = max(console.width, Measurement.get(console, unbounded, table).maximum)
    console.print(table)
    if left_out:
        console.print(
            f"no room here for {', '.join(left_out)}: widen the terminal, or see the report",
            style="dim",
        )
    console.print()


def _least_width(table: Table, console: Console) -> int:
    """Characters a line that a table of `rich_table` needs for whole figures."""
    from rich.measure import Measurement

    width = BETWEEN * (len(table.columns) - 1)
    for column in table.columns:
        parts = (column.header, *column.cells)
        widths = [Measurement.get(console, console.options, part).maximum for part in parts]
        width += max(widths) if column.no_wrap else column.min_width or max(widths)
    return width
