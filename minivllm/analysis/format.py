"""Numbers for people: few digits, one unit a column."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

MISSING = "–"
LEAST, MOST = (
    1e-3,
    1e3,
)  # of a ratio's interval; a few blocks that differ much have one whose ends say nothing


def sig(value: float | None, digits: int = 3) -> str:
    """`value` to so many significant digits, thousands separated, never in exponent form above
    1e-4."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    if abs(value) < 1e-4:
        return f"{value:.{digits - 1}e}"
    rounded = round(value, decimals)
    return f"{rounded:,.{max(0, min(decimals, 6))}f}"


def whole_percent(share: float | None) -> str:
    """A share such as 69 %, rounded down: 100 % is all of it."""
    return MISSING if share is None else f"{math.floor(100 * share)} %"


def ratio(value: float | None) -> str:
    """A ratio such as 3.42×."""
    return MISSING if value is None else f"{sig(value)}×"


def interval(low: float | None, high: float | None) -> str:
    """Of a ratio, `1.38 to 1.47`."""
    return MISSING if low is None or high is None else f"{_end(low)} to {_end(high)}"


def _end(value: float) -> str:
    return f"<{sig(LEAST, 1)}" if value < LEAST else f">{sig(MOST)}" if value > MOST else sig(value)


def cut(ends: list[float]) -> list[float]:
    """Ends of intervals as far as they say anything, so that the axis shows the rest."""
    return [min(max(end, LEAST), MOST) for end in ends]


def spanned(value: float | None, low: float | None, high: float | None) -> str:
    """A ratio with its interval, `1.42× [1.38, 1.47]`; without the brackets where there is none."""
    return ratio(value) + ("" if low is None or high is None else f" [{_end(low)}, {_end(high)}]")


def p_value(p: float | None) -> str:
    """Three decimals; a smaller one is `< 0.001`, never 0."""
    return MISSING if p is None else f"{p:.3f}" if p >= 0.001 else "< 0.001"


def count(n: int, noun: str, plural: str | None = None) -> str:
    """`1 cell`, `2 cells`."""
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"


def listing(items: list[str], limit: int = 5) -> str:
    """`a, b and c`; the rest is counted beyond the limit."""
    if len(items) > limit:
        return ", ".join(items[:limit]) + f" and {len(items) - limit} more"
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def in_cells(where: Mapping[str, Sequence[str]]) -> str:
    """What was found, each with the name of its cell, or of several with their number."""
    found = [
        f"{what} in {cells[0] if len(cells) == 1 else count(len(cells), 'cell')}"
        for what, cells in where.items()
    ]
    return listing(found, 4)


def show(value: Any) -> str:
    """A configuration value as one writes it on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, list | tuple):
        return "[" + ",".join(show(v) for v in value) + "]"
    return str(value)
