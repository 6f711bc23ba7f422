"""Pages in headless Chromium: what they draw, and what they complain about."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = next(
    (path for name in ("chromium", "google-chrome", "chrome") if (path := which(name))), None
)
PATIENCE_MS = 120_000.0
OWN = ("file:", "data:", "blob:", "about:")  # addresses that are no network


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser; skips the test where there is none.

    While it runs, nothing else may run an asyncio loop in this thread.
    """
    if CHROMIUM is None:
        pytest.skip("no Chromium to open the page in")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


def watch(page: Page, *own: str) -> list[str]:
    """What the page complains of from now on, and every address that it asks for, but for those
    that begin with one of `own`."""
    found: list[str] = []
    page.set_default_timeout(PATIENCE_MS)
    page.on("pageerror", lambda error: found.append(str(error)))
    page.on(
        "console",
        lambda said: found.append(said.text) if said.type in ("error", "assert") else None,
    )
    page.on(
        "request",
        lambda asked: None if asked.url.startswith((*OWN, *own)) else found.append(asked.url),
    )
    return found


def visit(browser: Browser, file: Path, done: str, width: int = 390) -> tuple[Any, list[str]]:
    """Open a page, wait until it has loaded and the expression `done` is true; return that with its
    errors.

    Args:
        browser: of `chromium`.
        file: the page.
        done: JavaScript.
        width: of the window, in pixels.
    """
    page = browser.new_page(viewport={"width": width, "height": 20_000})
    errors = watch(page)
    page.goto(file.as_uri())
    value = page.wait_for_function(done).json_value()
    page.close()
    return value, errors
