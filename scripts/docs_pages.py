"""Pictures of pages for the documentation, taken by headless Chromium."""

from __future__ import annotations

import io
import re
import tempfile
from pathlib import Path

from diagrams import browser
from PIL import Image

COLOURS = 128  # of a picture, whose file is small for it
DRAWING_MS = 500  # for the page's script to draw what was chosen


def missing() -> str | None:
    """What this machine lacks to take pictures of pages; None where nothing is missing."""
    try:
        import playwright  # noqa: F401
    except ImportError:
        return "the package playwright"
    return None if browser() else "Chromium"


def screenshot(page: str | Path, size: tuple[int, int], script: str = "") -> bytes:
    """A page as headless Chromium shows it, as PNG of few colours.

    Args:
        page: its HTML, or the file with it.
        size: width and height of the window, in pixels.
        script: JavaScript that prepares what is seen.
    """
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = page if isinstance(page, Path) else Path(folder) / "page.html"
        if isinstance(page, str):
            file.write_text(page, encoding="utf-8")
        opened = playwright.chromium.launch(executable_path=browser(), args=["--no-sandbox"])
        window = opened.new_page(viewport={"width": size[0], "height": size[1]})
        window.goto(file.resolve().as_uri(), wait_until="networkidle")
        if script:
            window.evaluate(script)
        window.wait_for_timeout(DRAWING_MS)
        seen = window.screenshot()
        opened.close()
    out = io.BytesIO()
    with Image.open(io.BytesIO(seen)) as image:
        few = image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
        few.save(out, "png", optimize=True)
    return out.getvalue()


def report(path: Path) -> bytes:
    """The first screen of a report of a sweep of two knobs."""
    with tempfile.TemporaryDirectory() as folder:
        return screenshot(built(path, Path(folder)), (1280, 1500))


def built(path: Path, folder: Path) -> Path:
    """The page of a report, written into a folder."""
    from minivllm.report.inputs import read
    from minivllm.report.page import write_report

    return write_report(read(path), folder)


def words(path: Path) -> str:
    """The text of a report's page up to the end of its first table."""
    with tempfile.TemporaryDirectory() as folder:
        page = built(path, Path(folder)).read_text(encoding="utf-8")
    seen = page[page.index("<body") : page.index("</table>")]
    seen = re.sub(r"<(script|style|svg)\b.*?</\1>", " ", seen, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", seen).split())


def live_view(path: Path) -> bytes:
    """A recorded run at its end, and the account of a request that was preempted."""
    from minivllm.analysis.rows import read_rows
    from minivllm.report.view.page import recorded_page
    from minivllm.report.view.recording import items_of, title_of

    rows, _ = read_rows([path])
    page = recorded_page(title_of(rows[0]), items_of(rows[0]))
    end = "minivllmView.seek(minivllmView.view.timeline.items.length - 1);"
    return screenshot(page, (1400, 900), f"{end} minivllmView.show({{ selected: 4 }})")


def view_page() -> str:
    """The page of the live view, without a recording."""
    from minivllm.report.view.page import recorded_page

    return recorded_page("", [])
