"""The only place that turns the description of a figure into files: PNG, and what the page
shows."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.report.figures import chart
from minivllm.report.figures.chart import Chart
from minivllm.report.figures.live import items
from minivllm.report.figures.palette import INK, ON_DARK
from minivllm.report.figures.style import (
    BESIDE,
    BESIDE_LONG,
    DPI,
    LONGEST,
    NARROW,
    WIDE,
    Drawing,
    Sheet,
    plain_settings,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TINTS = 32  # of a static picture, whose page is small for it
Described = Chart | Drawing


@dataclass(frozen=True)
class Plot:
    """A finished figure for the page."""

    name: str  # file name without .png
    title: str
    alt: str
    caption: str
    png: bytes
    # What the page shows: SVG; or WebP in the place of `live` until that is drawn, and on paper.
    wide: bytes
    narrow: bytes  # the same for a phone
    live: list[dict[str, Any]] = field(default_factory=list)  # what `live.items` makes
    legend: list[dict[str, Any]] = field(default_factory=list)  # keys of the live items' series


def finish(described: Described) -> Plot:
    """A chart as PNG and as what the page's script draws, a drawing as PNG and SVG; both also for a
    narrow page."""
    name = described.name
    words = (name, described.title, described.alt, described.caption)
    if isinstance(described, Chart):
        pixels, few = (paint(draw(described, sheet)) for sheet in (WIDE, NARROW))
        live, legend = items(described), chart.keys(described)
        return Plot(*words, png(pixels), webp(pixels), webp(few), live, legend)
    figure = draw(described, WIDE)
    pixels = paint(figure)
    narrow = svg(draw(described, NARROW), f"{name}-narrow")
    return Plot(*words, png(pixels), svg(figure, name), narrow)


def finish_opening(described: Chart) -> Plot:
    """The picture beside a page's answer as PNG and SVG for half a page and for a phone: it is seen
    at once, also on paper."""
    name = described.name
    words = (name, described.title, described.alt, described.caption)
    names = (row for _, panels in described.rows for panel in panels for row in panel.rows)
    sheet = BESIDE_LONG if max(map(len, names), default=0) > LONGEST else BESIDE
    figure = draw(described, sheet)
    pixels = paint(figure)
    narrow = svg(draw(described, NARROW), f"{name}-narrow")
    return Plot(*words, png(pixels), svg(figure, name), narrow)


def draw(described: Described, sheet: Sheet) -> Figure:
    """The figure by matplotlib, whose names show dollar signs as they are."""
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}):
        if isinstance(described, Chart):
            return chart.draw(described, sheet)
        return described.draw(sheet)


def svg(figure: Figure, name: str) -> bytes:
    """The figure as an SVG that follows the reader's colour scheme; the same figure gives the same
    bytes.

    Nothing is painted behind it, so that the page's paper and the shadows at the edges of its card
    show through.
    """
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    out = io.StringIO()
    nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
    for patch_behind in (figure.patch, *(ax.patch for ax in figure.axes)):
        patch_behind.set_facecolor("none")
    with plain_settings(**{"svg.fonttype": "none", "svg.hashsalt": name}):
        # Not by savefig, which draws a figure twice.
        FigureCanvasSVG(figure).print_svg(out, metadata=nothing)
    text = re.sub(r"<[^>]+>", lambda tag: _rounded(tag[0]), out.getvalue())
    text = re.sub(f"(?<=: )({'|'.join(ON_DARK)})", lambda match: f"var(--c{match[0][1:]})", text)
    text = text.replace("'DejaVu Sans'", "system-ui, 'DejaVu Sans'")
    text = re.sub(
        r'^.*?(?=<svg)|(?<=<g) id="[^"]*"|\s+(?=<[/a-z])|(?<=>)\s+(?=<)', "", text, flags=re.DOTALL
    )
    styles: dict[str, str] = {}  # the same few stand at every line and word

    def classed(match: re.Match[str]) -> str:
        return f'class="{styles.setdefault(match[1], f"s{len(styles)}")}"'

    text = re.sub(r'(?<= )style="([^"]*)"', classed, text)
    used = [key for key in ON_DARK if key == INK or any(key[1:] in rule for rule in styles)]

    def scheme(colours: dict[str, str]) -> str:
        return ":root {" + " ".join(f"--c{key[1:]}: {colours.get(key, key)};" for key in used) + "}"

    rules = "".join(f".{name} {{{rule}}}" for rule, name in styles.items())
    dark = f"@media screen and (prefers-color-scheme: dark) {{ {scheme(ON_DARK)} }}"
    style = f"{scheme({})} {dark} text {{ fill: var(--c{INK[1:]}); }} {rules}"
    return re.sub(r"(<svg[^>]*>)", rf"\1<style>{style}</style>", text, count=1).encode()


def _rounded(tag: str) -> str:
    """A tag whose coordinates have two decimals, which are more than are seen."""
    tag = re.sub(
        r"\d+\.\d{3,}", lambda match: f"{float(match[0]):.2f}".rstrip("0").rstrip("."), tag
    )
    return re.sub(r' transform="rotate\(-0[^"]*"|\s+(?=")', "", re.sub(r"\s+", " ", tag))


def paint(figure: Figure) -> np.ndarray:
    """The figure's pixels, uint8 [height, width, 4]; the same figure gives the same."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with plain_settings():
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
    figure.set_layout_engine("none")  # all has its place now, in whatever format it is drawn next
    return np.asarray(canvas.buffer_rgba())


def png(pixels: np.ndarray) -> bytes:
    """A PNG of `DPI`."""
    from matplotlib.image import imsave

    out = io.BytesIO()
    imsave(out, pixels, format="png", dpi=DPI, metadata={"Software": "minivllm"})
    return out.getvalue()


def webp(pixels: np.ndarray) -> bytes:
    """A WebP of few colours."""
    from PIL import Image

    out = io.BytesIO()
    few = Image.fromarray(pixels).convert("RGB").quantize(TINTS)
    few.convert("RGB").save(out, "webp", lossless=True)
    return out.getvalue()
