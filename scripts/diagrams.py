"""Draws the Mermaid diagrams of docs/ as SVG, for the site: nothing is fetched when a page is read.

Chromium runs Mermaid once for all diagrams. Its script comes from npm, into build/mermaid.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "mermaid"
PACKAGE = "mermaid@11.17.2"
BROWSERS = ("chromium", "google-chrome", "chrome")
TIMEOUT_S = 300
# Text in place of HTML within the SVG, which an <img> shows in every browser.
SETTINGS = {"theme": "neutral", "htmlLabels": False, "flowchart": {"htmlLabels": False}}
PAGE = """<!DOCTYPE html><meta charset="utf-8"><script src="mermaid.min.js"></script>
<body><script>
const settings = {settings}, sources = {sources};
mermaid.initialize({{startOnLoad: false, ...settings}});
(async () => {{
  const drawn = [];
  for (let i = 0; i < sources.length; i++)
    drawn.push((await mermaid.render("diagram" + i, sources[i])).svg);
  const out = document.createElement("pre");
  out.id = "drawn";
  out.textContent = JSON.stringify(drawn);
  document.body.replaceChildren(out);
}})();
</script></body>
"""


def missing() -> str | None:
    """What this machine lacks to draw diagrams; None where nothing is missing."""
    if browser() is None:
        return "Chromium"
    if not (FOLDER / "mermaid.min.js").exists() and shutil.which("npm") is None:
        return "npm"
    return None


def draw(sources: Sequence[str]) -> list[str]:
    """The SVG of each diagram.

    Args:
        sources: in Mermaid's language.

    Raises:
        RuntimeError: Mermaid did not draw them.
    """
    _fetch_mermaid()
    page = FOLDER / "page.html"
    page.write_text(
        PAGE.format(settings=json.dumps(SETTINGS), sources=json.dumps(list(sources))), "utf-8"
    )
    program = browser()
    assert program is not None, "the caller has asked `missing`"
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += ["--disable-background-networking", f"--user-data-dir={FOLDER / 'profile'}"]
    command += ["--virtual-time-budget=60000", "--dump-dom", page.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    found = re.search(r'<pre id="drawn">(.*?)</pre>', dom.stdout, re.DOTALL)
    if found is None:
        raise RuntimeError(f"Mermaid drew nothing: {dom.stderr.strip()[-500:]}")
    return [_sized(svg) for svg in json.loads(html.unescape(found[1]))]


def _sized(svg: str) -> str:
    """A picture of its own size on white, rather than one that fills any width."""
    width = re.search(r'viewBox="\S+ \S+ (\S+) ', svg)
    assert width is not None
    return re.sub(
        r'width="100%"(.*?)style="',
        rf'width="{width[1]}"\1style="background: white; ',
        svg,
        count=1,
    )


def browser() -> str | None:
    """The path of Chromium or Chrome, where one is installed."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def _fetch_mermaid() -> None:
    """Mermaid's script, from the package of the pinned version."""
    script = FOLDER / "mermaid.min.js"
    if script.exists():
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    packed = subprocess.run(
        ["npm", "pack", "--silent", PACKAGE],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    archive = FOLDER / packed.stdout.strip().splitlines()[-1]
    with tarfile.open(archive) as package:
        member = package.extractfile("package/dist/mermaid.min.js")
        assert member is not None
        script.write_bytes(member.read())
    archive.unlink()
