"""The only place that turns the description of a figure into files: PNG, and what the page
shows."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minivllm.report.figures import chart
from minivllm.report.figures.chart import Chart
from minivllm.report.figures.live import items
from minivllm.report.figures.palette import INK, ON_DARK
from minivllm.report.figures.style import NARROW, WIDE, Drawing, plain_settings

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
    svg: bytes = b""  # what the page shows, unless it shows `live`
    narrow: bytes = b""  # the same for a phone; of a figure with `live` a PNG
    live: list[dict[str, Any]] = field(default_factory=list)  # Bokeh's items, each with a title
    legend: list[dict[str, Any]] = field(default_factory=list)  # keys of the live items' series

    @property
    def static(self) -> tuple[bytes, bytes]:
        """What stands in the place of `live` until it is drawn, and on paper: WebP, for a wide page
        and for a phone."""
        return _small(self.png), _small(self.narrow)


def _small(png: bytes) -> bytes:
    """A PNG as WebP of few colours."""
    from PIL import Image

    out = io.BytesIO()
    with Image.open(io.BytesIO(png)) as opened:
        opened.convert("RGB").quantize(TINTS).convert("RGB").save(out, "webp", lossless=True)
    return out.getvalue()


def finish(described: Described) -> Plot:
    """A chart as PNG and as what the page's script draws, a drawing as PNG and SVG; both also for a
    narrow page."""
    words = (described.name, described.title, described.alt, described.caption)
    if isinstance(described, Chart):
        wide, narrow = (png(chart.draw(described, sheet)) for sheet in (WIDE, NARROW))
        return Plot(
            *words, wide, narrow=narrow, live=items(described), legend=chart.keys(described)
        )
    figure, name = described.draw(WIDE), described.name
    return Plot(
        *words, png(figure), svg(figure, name), svg(described.draw(NARROW), f"{name}-narrow")
    )


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
        _without_math(figure)
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


def png(figure: Figure) -> bytes:
    """The figure as PNG; the same figure gives the same bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    out = io.BytesIO()
    with plain_settings():
        _without_math(figure)
        FigureCanvasAgg(figure).print_png(out, metadata={"Software": "minivllm"})
    figure.set_layout_engine("none")  # all has its place now, in whatever format it is drawn next
    return out.getvalue()


def _without_math(figure: Figure) -> None:
    """Show words as they are; axes write those of their ticks under the settings of
    `plain_settings`."""
    from matplotlib.text import Text

    for words in figure.findobj(Text):
        words.set_parse_math(False)
