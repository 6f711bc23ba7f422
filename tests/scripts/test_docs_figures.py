"""The pictures of the documentation are those of today's records, functions and pages."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image

from tests.pictures import unpainted
from tests.scripts.load import load_script

figures = load_script("docs_figures")
pages, pictures = sys.modules["docs_pages"], sys.modules["docs_pictures"]


def drawn(path: Path) -> bytes:
    """A picture as large as the text in a file is long."""
    out = io.BytesIO()
    Image.new("L", (side(path), 4)).save(out, "png")
    return out.getvalue()


def side(path: Path) -> int:
    return len(path.read_text())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("EXAMPLES", "IMAGES"):
        monkeypatch.setattr(pictures, name, tmp_path)
    (tmp_path / "record.json").write_text("measured")
    return tmp_path


@pytest.mark.parametrize("name", figures.PICTURES)
def test_a_picture_is_not_older_than_what_it_shows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minivllm.report.page.finish", unpainted)  # the page's words stay
    command = f"python scripts/docs_figures.py {name}"
    assert not figures.PICTURES[name].is_stale(), f"it shows something else now: {command}"


def test_every_picture_is_drawn_by_the_script() -> None:
    assert {picture.file for picture in figures.PICTURES.values()} == {*pictures.IMAGES.iterdir()}


def test_a_change_of_what_is_shown_makes_a_picture_stale(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = ["a page"]
    picture = pictures.Picture(drawn, ("record.json",), lambda: shown[0])
    picture.write()
    with Image.open(picture.file) as image:
        assert image.size == (8, 4)
    assert not picture.is_stale()
    shown[0] = "another page"
    assert picture.is_stale()
    picture.write()
    (folder / "record.json").write_text("measured again")
    assert picture.is_stale()
    picture.write()
    assert not picture.is_stale()
    monkeypatch.setitem(globals(), "side", lambda path: 3)  # a function that `drawn` uses
    assert picture.is_stale()
    picture.file.write_bytes(drawn(folder / "record.json"))
    assert picture.is_stale(), "a file without a digest is no picture of the script"


def test_pictures_of_pages_are_left_out_without_a_browser(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain = pictures.Picture(drawn, ("record.json",))
    monkeypatch.setattr(figures, "PICTURES", {"report": None, "drawn": plain})
    monkeypatch.setattr(figures, "ROOT", folder)
    monkeypatch.setattr(pages, "browser", lambda: None)
    monkeypatch.setitem(sys.modules, "playwright", ModuleType("playwright"))
    monkeypatch.setattr(sys, "argv", ["docs_figures.py"])
    figures.main()
    said = capsys.readouterr()
    assert said.out == "drawn.png\n"
    assert said.err == "left out: report, a picture of a page, which needs Chromium\n"
