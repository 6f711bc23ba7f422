"""The page as a whole: self-contained, with figures, links that resolve, and rebuilt the same."""

from __future__ import annotations

import base64
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlparse

import pytest

from minivllm.bench.records.record import STATUSES
from minivllm.bench.records.storage import OPERATIONS
from tests.pictures import painted_if_own
from tests.report.browser import chromium, visit, watch
from tests.report.pagereader import Page, build, build_report, table
from tests.report.synthetic import counted, failed, make_record, make_sweep, write

if TYPE_CHECKING:
    from playwright.sync_api import Browser

TIMELINES = {"steps", "telemetry"}  # figures of the parquet files
RUNS = Path(__file__).parents[2] / "reports" / "examples" / "cpu" / "runs"


@dataclass(frozen=True)
class Built:
    """A page that no test changes, three folders from its records."""

    sweep: Path  # as the fixture of this name
    index: Path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("built")
    sweep = write(folder / "runs", make_sweep())
    return Built(sweep, build_report(sweep, folder / "deep" / "er" / "report"))


def shown(page: Page) -> set[str]:
    """The names of the figures of a page, each with its picture."""
    names = [name for name in page.attributes("figure", "id") if name.startswith("figure-")]
    assert len(names) == len(set(names)) == len(page.attributes("img", "src"))
    return {name.removeprefix("figure-") for name in names}


def test_links_to_the_subject_by_its_earlier_name_lead_there(built: Built) -> None:
    page = Page(built.index)
    assert "subject" in page.attributes("section", "id") and "asked" in page.attributes("a", "id")


def test_page_is_well_formed_and_needs_no_network(built: Built) -> None:
    page = Page(built.index)
    assert shown(page) == {path.stem for path in built.index.parent.glob("*.png")}
    assert {"opening", "throughput", "latency", "memory", *TIMELINES} <= shown(page)
    sources = (
        page.attributes("img", "src")
        + page.attributes("script", "src")
        + page.attributes("link", "href")
    )
    assert all(source.startswith("data:") for source in sources)
    assert not re.search(r"url\(|@import|https?:", page.source)
    assert all(len(alt) > 30 for alt in page.attributes("img", "alt"))
    assert "viewport" in page.attributes("meta", "name")
    assert "prefers-color-scheme: dark" in page.source


def test_links_resolve_and_name_the_records(built: Built) -> None:
    out, page = built.index.parent, Page(built.index)
    links = page.attributes("a", "href")
    assert all(not urlparse(link).scheme for link in links)
    names = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(names) == len(set(names))
    assert {link[1:] for link in links if link.startswith("#")} <= set(names)
    targets = {(out / unquote(link)).resolve() for link in links if not link.startswith("#")}
    assert all(target.is_file() for target in targets)
    assert {t for t in targets if t.name == "record.json"} == set(built.sweep.glob("*/record.json"))
    assert {"table.csv", "table.md", "throughput.png"} <= {target.name for target in targets}


@pytest.mark.parametrize("status", [status for status in STATUSES if status != "ok"])
def test_nothing_but_one_failure_still_gives_a_report(tmp_path: Path, status: str) -> None:
    record = failed(
        make_record(),
        status,
        "SomeError",
        "it <b>went</b> wrong & badly",
        "first line\nlast <line>",
    )
    page, out = build(tmp_path, [record])
    how = "is invalid" if status == "invalid" else f"failed ({status})"
    assert f"The only cell {how}: it <b>went</b> wrong & badly." in page.text
    assert "it <b>went</b> wrong & badly" in page.text  # escaped in the source
    assert "last <line>" in page.text and "<b>" not in page.source
    assert next(iter(table(out).values()))["status"] == status
    assert status in (out / "table.md").read_text()


def test_without_parquet_files_only_the_timelines_are_missing(built: Built, tmp_path: Path) -> None:
    page, out = build(tmp_path, make_sweep(), parquet=False)
    assert not any((out / f"{name}.png").exists() for name in TIMELINES)
    assert shown(page) == shown(Page(built.index)) - TIMELINES


def test_a_torn_parquet_file_does_not_cost_the_report(
    built: Built, sweep: Path, tmp_path: Path
) -> None:
    for path in sweep.glob("*/*.parquet"):
        path.write_bytes(b"PAR1 torn")
    page = Page(build_report(sweep, tmp_path / "out"))
    assert shown(page) == shown(Page(built.index)) - TIMELINES


def test_timelines_are_capped_and_say_so(tmp_path: Path) -> None:
    records = [
        make_record(cell_id=f"c{i}", arm=f"arm {i}", run_id=f"r{i}", index=i) for i in range(14)
    ]
    page, _ = build(tmp_path, records)
    assert "Shown: 8 of 14 finished cells" in page.text


@pytest.mark.usefixtures("without_figures")
def test_a_record_leads_to_the_operations_of_its_trace(sweep: Path, tmp_path: Path) -> None:
    traced = next(iter(sweep.glob("*/record.json"))).with_name(OPERATIONS)
    traced.write_text("| operation |")
    out = tmp_path / "out"
    links = Page(build_report(sweep, out)).attributes("a", "href")
    assert [(out / unquote(link)).resolve() for link in links if link.endswith(OPERATIONS)] == [
        traced
    ]


@pytest.mark.usefixtures("without_figures")
def test_each_number_leads_to_its_record_or_to_the_list_of_them(tmp_path: Path) -> None:
    for blocks, expected in ((1, r'href="[^"#]*record\.json"'), (2, r'href="#records-1"')):
        page, _ = build(tmp_path / str(blocks), make_sweep(blocks), parquet=False)
        first = page.source[page.source.index("<tbody>") :]
        row = first[: first.index("</tr>")]
        assert re.search(r'class="figure-link" ' + expected, row), row
        assert row.count("figure-link") >= 5
    assert 'id="records-1"' in page.source


@pytest.mark.usefixtures("painted_anew")
def test_two_hundred_cells_stay_small(tmp_path: Path) -> None:
    records = [
        make_record(cell_id=f"c{i}", arm=f"arm {i}", run_id=f"r{i}", index=i, roofline=counted(i))
        for i in range(200)
    ]
    page, out = build(tmp_path, records)
    assert len(page.source) < 2_500_000
    assert sum(path.stat().st_size for path in out.iterdir()) < 5_000_000
    assert page.text.count("arm 199") >= 2 and "The first 48 of 200 cells" in page.text


@pytest.mark.usefixtures("without_figures")
def test_a_thousand_records_are_read(tmp_path: Path) -> None:
    records = [
        make_record(cell_id=f"c{i // 5}", arm=f"arm {i // 5}", run_id=f"r{i}", block=i % 5, index=i)
        for i in range(1000)
    ]
    _, out = build(tmp_path, records, parquet=False)
    rows = table(out)
    assert len(rows) == 200 and {row["blocks_ok"] for row in rows.values()} == {"5"}


@pytest.mark.usefixtures("painted_anew")
def test_a_browser_draws_every_figure_without_an_error(
    browser: Browser, built: Built, tmp_path: Path
) -> None:
    """Those of the ablation have logarithmic axes."""
    ablation = build_report(RUNS / "ablation.tar.xz", tmp_path / "report")
    painted = """(canvas) => canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height)
        .data.some((value) => value)"""
    drawn = f"""[...document.querySelectorAll('.drawing')].every((place) => place.matches('.drawn')
        && place.querySelector('.plot .u-over')
        && [...place.querySelectorAll('canvas')].every({painted}))"""
    for index in (built.index, ablation):
        places = Page(index).attributes("div", "data-chart")
        assert {*places} > TIMELINES
        there = f"document.querySelectorAll('.drawing').length === {len(places)}"
        assert visit(browser, index, f"{there} && {drawn}") == (True, [])


def test_a_figure_names_its_points_enlarges_a_part_and_hides_a_series(
    browser: Browser, built: Built
) -> None:
    page = browser.new_page(viewport={"width": 1400, "height": 20_000})
    errors = watch(page)
    page.goto(built.index.as_uri())
    chosen = "[data-chart=latency_throughput]"
    page.wait_for_function(f"document.querySelector('{chosen}').matches('.drawn')")
    place = page.locator(chosen)
    box = place.locator(".u-over").first.bounding_box()
    assert box is not None

    def drawn() -> str:
        return str(page.evaluate(f"document.querySelector('{chosen} canvas').toDataURL()"))

    def at(x: float, y: float) -> tuple[float, float]:
        return box["x"] + x * box["width"], box["y"] + y * box["height"]

    whole, tip, names = drawn(), place.locator(".tip").first, set()
    for step in range(400):
        page.mouse.move(*at(step % 20 / 20, step // 20 / 20))
        names |= {tip.inner_text()} if tip.is_visible() else set()
    assert names and all(names)
    page.mouse.move(*at(0.2, 0.2))
    page.mouse.down()
    page.mouse.move(*at(0.6, 0.6), steps=3)
    page.mouse.up()
    reset = place.locator(".whole").first
    assert drawn() != whole and reset.is_visible()
    reset.click()
    assert drawn() == whole and not reset.is_visible()
    key = place.locator(".legend button").first
    key.click()
    assert drawn() != whole and key.get_attribute("aria-pressed") == "false"
    key.click()
    assert drawn() == whole and errors == []
    page.close()


def test_on_a_phone_a_table_scrolls_in_its_box_and_bars_are_whole(
    browser: Browser, built: Built
) -> None:
    index = built.index
    box, card = (
        "document.querySelector('#results .scroll')",
        "document.querySelector('#figure-throughput .card')",
    )
    cut = f"document.documentElement.scrollWidth <= innerWidth && {box}.matches('.cut')"
    seen = (
        f"[getComputedStyle({box}).backgroundAttachment, getComputedStyle({box}, "
        "'::after').content]"
    )
    bars = f"[{card}.scrollWidth <= {card}.clientWidth, {card}.querySelector('img').currentSrc]"
    (shadows, hint, whole, source), errors = visit(
        browser,
        index,
        f"{cut} && {card}.querySelector('img').complete && [...{seen}, ...{bars}]",
    )
    assert shadows == "local, local, scroll, scroll" and "scroll sideways" in hint and errors == []
    narrow = base64.b64decode(source.partition(",")[2]).decode()
    assert whole and 'width="295.2pt"' in narrow  # a drawing of its own


def test_a_long_word_does_not_widen_the_page(
    browser: Browser, built: Built, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    page.write_text(built.index.read_text().replace("</main>", f"<p>{'x' * 200}</p></main>"))
    width, errors = visit(browser, page, "document.documentElement.scrollWidth")
    assert width == 390 and errors == []


def test_on_a_phone_the_first_column_has_all_that_varies(browser: Browser, built: Built) -> None:
    cells = "[...document.querySelector('#cells tbody tr').cells].filter((c) => c.offsetWidth)"
    shown = f"{cells}.slice(0, 3).map((cell) => cell.innerText)"
    wide, errors = visit(browser, built.index, shown, width=1400)
    assert wide == ["fp16", "sequential", "ok"] and errors == []
    narrow, errors = visit(browser, built.index, shown)
    assert narrow[:2] == ["fp16\nsequential", "ok"] and errors == []


def test_the_table_of_results_has_room_in_its_column(browser: Browser, built: Built) -> None:
    index = built.index
    place = "document.querySelector('#results .scroll')"
    inside = (
        f"{place}.getBoundingClientRect().right <= "
        "document.querySelector('main').getBoundingClientRect().right"
    )
    found, errors = visit(browser, index, f"[!{place}.matches('.cut'), {inside}]", width=1400)
    assert found == [True, True] and errors == []


def test_figures_are_seen_before_they_are_drawn_and_without_scripts(
    browser: Browser, built: Built, tmp_path: Path
) -> None:
    index = built.index
    still = tmp_path / "still.html"
    still.write_text(re.sub(r"<script.*?</script>", "", index.read_text(), flags=re.S))
    images = (
        "[...document.images].map((i) => i.complete && i.naturalWidth > 100 && i.offsetWidth > 100)"
    )
    count = len(shown(Page(index)))
    for page in (index, still):
        at_once = f"scrollY === 0 && document.images.length === {count} && {images}"
        found, errors = visit(browser, page, at_once)
        assert len(found) == count and errors == []
        assert page is index or all(found)


def test_a_phone_is_given_pictures_of_its_own(
    browser: Browser, built: Built, tmp_path: Path
) -> None:
    """Drawn for its width: scaled down to it, words of a wide picture cannot be read."""
    index = built.index
    still = tmp_path / "still.html"
    still.write_text(re.sub(r"<script.*?</script>", "", index.read_text(), flags=re.S))
    images = "[...document.querySelectorAll('.static img')]"
    ready = (
        f"{images}.every((i) => i.complete) && {images}.map((i) => i.naturalWidth / i.offsetWidth)"
    )
    scales, errors = visit(browser, still, ready, width=390)
    assert len(scales) == len(Page(index).attributes("div", "data-chart")) > 0
    assert max(scales) < 2 and errors == []


def test_many_columns_of_names_leave_room_for_figures_on_paper(
    browser: Browser, tmp_path: Path
) -> None:
    records = [make_record(index=index) for index in range(2)]
    knobs = "num_speculative_tokens", "acceptance", "exit_layer", "adaptive"
    for index, record in enumerate(records):
        record.cell_id = record.run_id = str(index)
        record.config["speculative"] = {"_target_": "p.P", **dict.fromkeys(knobs, index + 1)}
    page = browser.new_page(viewport={"width": 720, "height": 1000})
    page.emulate_media(media="print")
    page.goto(build_report([write(tmp_path / "runs", records)], tmp_path / "out").as_uri())
    shown = "[...document.querySelectorAll('#results th.other')].map((h) => h.offsetWidth)"
    widths = page.evaluate(shown)
    assert len(widths) >= 3 and not any(widths)
    assert page.evaluate("document.querySelector('#results .others').offsetHeight") > 0
    page.close()


def test_the_glossary_is_closed_but_on_paper(browser: Browser, built: Built) -> None:
    index = built.index
    tall = "document.querySelector('#glossary').offsetHeight"
    printing = (
        f"const closed = {tall}; dispatchEvent(new Event('beforeprint')); const printed = {tall};"
    )
    after = f"dispatchEvent(new Event('afterprint')); return [closed, printed, {tall}]"
    heights, _ = visit(browser, index, f"(() => {{ {printing} {after} }})()")
    assert heights[0] == heights[2] < 200 and heights[1] > 1000
    led, _ = visit(
        browser, index, f"location.hash = 'glossary', {tall} > 1000"
    )  # a link of the page opens it
    assert led


def test_a_browsers_complaint_is_heard(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        "<script>console.error('one'); nothing.here()</script><script>window.over = 1</script>"
    )
    found, errors = visit(browser, page, "window.over")
    assert found == 1 and "one" in errors[0] and "nothing is not defined" in str(errors)


@pytest.mark.usefixtures("painted_anew")
def test_rebuilding_changes_nothing_and_leaves_nothing_behind(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, copy = built.index.parents[3], tmp_path / "copy"
    shutil.copytree(original, copy)
    sweep, out = (copy / path.relative_to(original) for path in (built.sweep, built.index.parent))
    before = {
        path.name: path.read_bytes().replace(bytes(original), bytes(copy)) for path in out.iterdir()
    }
    (out / "latency.png").write_bytes(b"old")
    build_report(sweep, out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    for parquet in sweep.glob("*/*.parquet"):
        parquet.unlink()
    monkeypatch.setattr("minivllm.report.page.finish", painted_if_own)  # their names are looked at
    build_report(sweep, out)
    assert {path.name for path in out.iterdir()} == {*before} - {f"{one}.png" for one in TIMELINES}
