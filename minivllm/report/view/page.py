"""The page that shows an engine's steps: one HTML file that loads nothing, of a running engine or
of a recording that lies in it."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

LIBRARIES = ("uPlot.iife.min.js", "htm-preact-standalone.umd.js")
# One module; each file uses only names of those before it while it is loaded.
SCRIPTS = (
    *("setup", "words", "state", "account", "timeline", "drawing", "lanes", "grid", "charts"),
    *("player", "inspect", "log", "app"),
)
LIVE_SCRIPTS = (*SCRIPTS[:-1], "live", "app")
TITLE = "minivllm, live"


def live_page() -> str:
    """The page of a running engine: it connects to `ws/events` beside its own address."""
    return _page(TITLE, LIVE_SCRIPTS, "'self'")


def recorded_page(title: str, items: Iterable[Mapping[str, Any]]) -> str:
    """A page with a recording in it, which needs nothing else, not even a server.

    Args:
        title: shown above the page, and by the browser.
        items: step bundles, and `{"gauges": {"time_s", "memory_bytes", "watts"}}`, in order; the
            first bundle holds the whole state.
    """
    text = json.dumps(list(items), separators=(",", ":"))
    packed = base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
    data = f'<script type="application/octet-stream" id="data">{packed}</script>\n'
    return _page(title, SCRIPTS, "'none'", data)


@cache
def _read(folder: str, name: str) -> str:
    return files(__package__).joinpath(folder, name).read_text(encoding="utf-8")


def _script(name: str) -> str:
    """Without comments, indentation, and spaces that end at an operator or a bracket, which a
    browser does not need. A string or a text of the scripts has none of these."""
    text = re.sub(r"^\s*(//.*\n\s*)*", "", _read("web", f"{name}.js"), flags=re.MULTILINE)
    text = re.sub(r" // .*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\b(if|for) \(", r"\1(", text)
    text = re.sub(r" (===|!==|=>|\?\?|&&|\|\||<=|>=|[-+*/<>]?=|[*<>]) ", r"\1", text)
    return re.sub(r"(?<=[;,{(\[])\n|\n(?=[}\])])|(?<=\)) (?=\{)|(?<=\{) | (?=\})", "", text)


def _style() -> str:
    text = re.sub(r"/\*.*?\*/", "", _read("web", "style.css"), flags=re.DOTALL)
    return re.sub(r"\s*([{};,])\s*|(?<=:)\s+", r"\1", text)


def _embedded(value: Any) -> str:
    """JSON that may stand in a script element: nothing in it ends the element."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _digest(text: str) -> str:
    """How a Content-Security-Policy names an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _page(title: str, scripts: Iterable[str], connections: str, data: str = "") -> str:
    """A page whose policy allows its own scripts and styles, and these connections alone."""
    libraries = "\n".join(_read("vendor", name) for name in LIBRARIES)
    module = "\n".join(map(_script, scripts))
    style = _style()
    policy = (
        f"default-src 'none'; script-src {_digest(libraries)} {_digest(module)}; "
        f"style-src {_digest(style)}; img-src data:; connect-src {connections}; "
        "base-uri 'none'; form-action 'none'"
    )
    words = json.loads(_read(".", "words.json"))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{html.escape(title)}</title>
<style>{style}</style>
</head>
<body>
<div id="app"></div>
<noscript>This page needs JavaScript.</noscript>
<script type="application/json" id="words">{_embedded(words)}</script>
{data}<script>{libraries}</script>
<script type="module">{module}</script>
</body>
</html>
"""
