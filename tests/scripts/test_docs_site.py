"""The site of docs/: every page is in its navigation, links lead out of docs/ rightly, and it
builds without a warning."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.load import load_script

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
GITHUB = "https://github.com/someone/minivllm/blob/main"

script = load_script("docs_site")


@pytest.fixture
def site(tmp_path: Path) -> Any:
    return script.Site(tmp_path / "build" / "docs", GITHUB)


def pages(nav: Any) -> Iterator[str]:
    """The files that a navigation names, in order."""
    if isinstance(nav, str):
        yield nav
        return
    for entry in nav.values() if isinstance(nav, dict) else nav:
        yield from pages(entry)


def test_the_navigation_lists_every_page_once() -> None:
    project = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
    found = [path.relative_to(DOCS) for path in DOCS.rglob("*") if path.suffix in (".md", ".ipynb")]
    expected = [path.with_suffix(".md").as_posix().replace("README", "index") for path in found]
    assert sorted(pages(project["nav"])) == sorted(expected)


def test_links_are_those_of_the_site(site: Any) -> None:
    page = DOCS / "reference" / "page.md"
    text = """See [a](../guides/python.md#as-it-comes), [b](../README.md), [c](https://x.org/README.md),
[d](#here).
[e](../../minivllm/llm.py) `[f](../../run.py)` ![g](../../reports/examples/cpu/kernels/kernels.png)
<!-- h -->

    [i](../../run.py)
```
[j](../../run.py)
```
"""
    picture = "../reports/examples/cpu/kernels/kernels.png"
    assert site.page(page, text) == (
        "See [a](../guides/python.md#as-it-comes), [b](../index.md), "
        "[c](https://x.org/README.md),\n[d](#here).\n"
        f"[e]({GITHUB}/minivllm/llm.py) `[f](../../run.py)` ![g]({picture})\n"
        "\n\n"
        "    [i](../../run.py)\n"
        "```\n"
        "[j](../../run.py)\n"
        "```\n"
    )
    assert (page.parent / picture).name == "kernels.png" and (site.output / picture[3:]).is_file()
    with pytest.raises(SystemExit, match=r"reference/page\.md links to \.\./nowhere\.png"):
        site.page(page, "[k](../nowhere.png)")


def test_a_diagram_is_a_picture_or_its_source(site: Any) -> None:
    page, text = DOCS / "reference" / "page.md", "a\n\n```mermaid\nx --> y\n```\nb\n"
    assert site.page(page, text) == "a\n\n```text\nx --> y\n```\nb\n"
    site.diagrams["x --> y\n"] = site.output / "images" / "d.svg"
    assert site.page(page, text) == "a\n\n![Diagram](../images/d.svg)\nb\n"


def test_a_page_of_an_example_is_linked_where_it_is_built(site: Any) -> None:
    report = "reports/examples/cpu/ablation/index.html"
    shown = site.page(
        DOCS / "examples.md", f"Page: `{report}`, `reports/examples/cpu/none/index.html`.\n"
    )
    assert shown == f"Page: [ablation]({report}), `reports/examples/cpu/none/index.html`.\n"
    copy = site.output / report
    found = set(re.findall(r'href="([^"#]+)"', copy.read_text()))
    places = {link for link in found if not re.match("[a-z]+:", link)}
    assert {"table.csv", "forest.png"} <= places and all(
        (copy.parent / link).is_file() for link in places
    )
    cell = f"{GITHUB}/reports/examples/cpu/runs/ablation"
    assert (
        any(link.startswith(cell) for link in found)
        and f"{GITHUB}/{Path(report).parent}/table.md" in found
    )


def test_the_repository_is_the_workflows_or_the_remotes(monkeypatch: pytest.MonkeyPatch) -> None:
    def remote(url: str) -> str:
        monkeypatch.setattr(
            script.subprocess,
            "run",
            lambda *a, **k: subprocess.CompletedProcess(a, 0, stdout=f"{url}\n"),
        )
        return str(script.repository())

    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    assert remote("git@github.com:someone/minivllm.git") == GITHUB
    assert remote("https://github.com/someone/minivllm") == GITHUB
    assert remote("/srv/minivllm") == remote("") == ROOT.as_uri()
    monkeypatch.setenv("GITHUB_REPOSITORY", "someone/minivllm")
    assert script.repository() == GITHUB


def test_the_site_builds_without_a_warning(
    site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("zensical", "nbconvert"):
        pytest.importorskip(name, reason=f"{name} is not installed: pip install -e '.[docs]'")
    monkeypatch.setattr(script.diagrams, "missing", lambda: "npm")
    site.prepare()
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    built = tmp_path / "build" / "site"
    assert (built / "index.html").is_file() and (
        built / "reference" / "metrics" / "index.html"
    ).is_file()
    assert "preemption" in (built / "search.json").read_text()
