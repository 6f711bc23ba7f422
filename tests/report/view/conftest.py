"""Fixtures of the live view's tests: a browser, a recording, and a page with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from minivllm.report.view.page import recorded_page
from tests.report.browser import chromium, watch
from tests.report.view.recording import record

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

TITLE = "a </script> run & more"


@dataclass(frozen=True)
class Recorded:
    """A page with a recording, opened.

    Attributes:
        items: of the recording.
        errors: what the page has complained of, and every address that it asked for.
    """

    page: Page
    items: list[dict[str, Any]]
    errors: list[str]

    @property
    def bundles(self) -> list[dict[str, Any]]:
        """The items that are no gauges."""
        return [item for item in self.items if "gauges" not in item]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def recorded(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    items = record()
    file: Path = tmp_path_factory.mktemp("page") / "page.html"
    file.write_text(recorded_page(TITLE, items), encoding="utf-8")
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    errors = watch(page)
    page.goto(file.as_uri())
    page.locator("#grid").wait_for()
    yield Recorded(page, items, errors)
    assert errors == []
