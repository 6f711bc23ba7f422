"""How each cell is drawn: one colour and one shape of its own in every figure of a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from minivllm.analysis.cell import Cell
from minivllm.analysis.cells import name_columns, spoken
from minivllm.analysis.format import MISSING
from minivllm.report.figures.palette import BLUE, GREY, MARKERS, PALETTE

MAX_STYLES = 2 * len(PALETTE)  # that differ as lines, too: each colour whole and dashed
OTHERS = "other cells"
MAX_NAME = 44  # characters that fit beside a bar


@dataclass(frozen=True)
class CellStyle:
    """A cell's style, and the words that figures have for it."""

    name: str  # of the cell
    colour: str = BLUE
    marker: str = MARKERS[0]  # matplotlib's letter
    dashed: bool = False
    legend: str = ""  # which cells may share; "" has no entry


class CellStyles(Mapping[str, CellStyle]):
    """The styles of all cells of a page, by their labels.

    Args:
        cells: all of them, so that a figure of some gives each the style that it has in the others.
    """

    def __init__(self, cells: Sequence[Cell]) -> None:
        # what the colours stand for; "" where each cell has its own
        self.column, values = _first(cells)
        self.colours = dict(zip(values, PALETTE, strict=False))  # by its values
        names, self.note = _names(cells)  # the note says how long names were cut
        styles = self._by_column(cells, names) if self.column else {}
        kinds = {(style.colour, style.marker) for style in styles.values()}
        if not styles or len(kinds) < len(cells) <= MAX_STYLES:
            self.column, self.colours, styles = "", {}, _each(cells, names)
        self._styles = styles

    def __getitem__(self, label: str) -> CellStyle:
        return self._styles[label]

    def __iter__(self) -> Iterator[str]:
        return iter(self._styles)

    def __len__(self) -> int:
        return len(self._styles)

    def _by_column(self, cells: Sequence[Cell], names: dict[str, str]) -> dict[str, CellStyle]:
        """Coloured by the first column, and where there is room shaped by the second."""
        second = next((title for title in cells[0].varying if title != self.column), "")
        shapes = list(dict.fromkeys(cell.varying[second] for cell in cells)) if second else []
        if len(shapes) > len(MARKERS) or len(shapes) * len(self.colours) > MAX_STYLES:
            shapes = []
        styles = {}
        for cell in cells:
            value, legend, shape = (
                cell.varying[self.column],
                f"{self.column}={cell.varying[self.column]}",
                0,
            )
            if shapes:
                shape = shapes.index(cell.varying[second])
                if cell.varying[second] != MISSING:
                    legend += f" · {spoken(second, cell.varying[second])}"
            colour = self.colours.get(value, GREY)
            styles[cell.label] = CellStyle(
                names[cell.label], colour, MARKERS[shape], shape % 2 == 1, legend
            )
        return styles


def _first(cells: Sequence[Cell]) -> tuple[str, list[str]]:
    """The first column of few enough values, and these; arms of an ablation are known by their
    names alone."""
    if not cells or name_columns(list(cells)) == ["arm"]:
        return "", []
    for title in cells[0].varying:
        values = list(dict.fromkeys(cell.varying[title] for cell in cells if cell.configured))
        if 2 <= len(values) <= len(PALETTE):
            return title, values
    return "", []


def _names(cells: Sequence[Cell]) -> tuple[dict[str, str], str]:
    """What figures call the cells, and a sentence on it: long names that say the same knobs are
    distinguished by their values."""
    whole = {cell.label: cell.label for cell in cells}
    if max(map(len, whole), default=0) <= MAX_NAME or name_columns(list(cells)) == ["arm"]:
        return whole, ""
    values = {cell.label: " · ".join(cell.varying.values()) for cell in cells if cell.configured}
    if len(set(values.values())) < len(cells):
        return whole, ""
    return values, f" Cells are named by {' · '.join(cells[0].varying)}."


def _each(cells: Sequence[Cell], names: dict[str, str]) -> dict[str, CellStyle]:
    """A style each as far as they go; a lone cell needs no legend."""
    n = len(PALETTE)
    if len(cells) == 1:
        return {cells[0].label: CellStyle(cells[0].label)}
    styles = {label: CellStyle(name, GREY, legend=OTHERS) for label, name in names.items()}
    for i, cell in enumerate(cells[:MAX_STYLES]):
        name = names[cell.label]
        styles[cell.label] = CellStyle(name, PALETTE[i % n], MARKERS[i // n], i >= n, name)
    return styles
