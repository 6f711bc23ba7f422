"""Prepare the pages of docs/ for the site: `make docs` runs this, then Zensical on build/docs.

The pages are written for GitHub, where a link may lead to any file of the repository. The site
holds the files of docs/ alone, so it is built from a copy in which

- a link to a file outside docs/ leads to the repository on GitHub; a picture is copied into the
  site instead;
- the name of an example's page, `reports/examples/.../index.html`, is a link to a copy of it where
  `make examples` or `make docs` has built it; what is not built, such as its records, it links to
  on GitHub;
- README.md is index.md, and a notebook is a page;
- a Mermaid diagram is a picture, where there are Chromium and npm to draw it, else its source;
- the comments that name the record behind a figure are left out: Markdown's dialects differ in what
  follows one.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import diagrams

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
OUTPUT = ROOT / "build" / "docs"
PAGE = re.compile(r"`(reports/examples/[\w/-]+/index\.html)`")
IN_PAGE = re.compile(r'(?<=href=")(?![a-z]+:|#)[^"]+(?=")')
BUILT = (".csv", ".html", ".png")  # of a report: these are copied with its page
DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"`[^`]*`|\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")  # or code, which holds none


def repository() -> str:
    """The address of this repository's files: on GitHub (a workflow's, or that of the remote
    `origin`), else here."""
    if name := os.environ.get("GITHUB_REPOSITORY"):
        return f"https://github.com/{name}/blob/main"
    command = ["git", "-C", str(ROOT), "remote", "get-url", "origin"]
    origin = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    if found := re.fullmatch(r"(?:https://|git@)github\.com[/:](.+?)(?:\.git)?/?", origin):
        return f"https://github.com/{found[1]}/blob/main"
    return ROOT.as_uri()


def address(source: str, path: Path) -> str:
    """The address at which a file of the repository is shown."""
    place = f"{source}/{path.relative_to(ROOT).as_posix()}"
    return (
        f"{place}?" if place.startswith("file:") else place
    )  # else Zensical takes file:///x.md for a page of its own


def lines(text: str) -> Iterator[tuple[bool, str]]:
    """Each line of a page, and whether it is code (fenced or indented)."""
    fenced = False
    for line in text.splitlines():
        fence = line.lstrip().startswith("```")
        fenced ^= fence
        yield fenced or fence or line.startswith(("    ", "\t")), line


class Site:
    """A copy of the pages, made in a folder; `source` is the address of the repository's files."""

    def __init__(self, output: Path = OUTPUT, source: str | None = None) -> None:
        self.output = output
        self.source = source or repository()
        self.diagrams: dict[str, Path] = {}  # source -> its picture

    def prepare(self) -> None:
        """Write the copy, in place of the earlier content of the folder."""
        shutil.rmtree(self.output, ignore_errors=True)
        self._draw_diagrams()
        for path in sorted(path for path in DOCS.rglob("*") if path.is_file()):
            place = self.output / path.relative_to(DOCS)
            place.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".md":
                text = self.page(path, path.read_text(encoding="utf-8"))
                place.with_name(place.name.replace("README", "index")).write_text(
                    text, encoding="utf-8"
                )
            elif path.suffix == ".ipynb":
                self.notebook(path, place.with_suffix(".md"))
            else:
                shutil.copyfile(path, place)

    def _draw_diagrams(self) -> None:
        """Draw all diagrams at once; without the programs for it they stay sources."""
        pages = [path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))]
        sources = [source for page in pages for source in DIAGRAM.findall(page)]
        if lacking := diagrams.missing():
            print(f"no {lacking}: the site shows the sources of {len(sources)} diagrams")
            return
        folder = self.output / "images" / "diagrams"
        folder.mkdir(parents=True)
        for source, svg in zip(sources, diagrams.draw(sources), strict=True):
            place = folder / f"{hashlib.sha256(source.encode()).hexdigest()[:12]}.svg"
            place.write_text(svg, encoding="utf-8")
            self.diagrams[source] = place

    def diagram(self, page: Path, match: re.Match[str]) -> str:
        """The picture of a diagram, or its source as code."""
        if (place := self.diagrams.get(match[1])) is None:
            return match[0].replace("```mermaid", "```text")
        return f"![Diagram]({self.beside(page, place)})"

    def page(self, path: Path, text: str) -> str:
        """The text of a page as the site has it."""
        parts = []
        for code, line in lines(text):
            prose = re.sub("<!--.*?-->", "", line)
            parts.append(line if code else LINK.sub(lambda match: self.link(path, match), prose))
        linked = "\n".join(parts) + "\n"
        return DIAGRAM.sub(lambda match: self.diagram(path, match), linked)

    def link(self, page: Path, match: re.Match[str]) -> str:
        """The replacement of a link in a page."""
        if match[1] is None:
            return self.example(page, match[0])
        target, anchor = (page.parent / match[1]).resolve(), match[2] or ""
        if not target.exists():  # Zensical looks for pages and headings alone
            raise SystemExit(f"{page.relative_to(ROOT)} links to {match[1]}, which is not there")
        if target.is_relative_to(DOCS):
            place = match[1].replace("README.md", "index.md").replace(".ipynb", ".md")
        elif target.suffix == ".png":
            place = self.beside(page, self.copied(target))
        else:
            place = address(self.source, target)
        return f"]({place}{anchor})"

    def beside(self, page: Path, copy: Path) -> str:
        """The link from a page of docs/ to a file of the site."""
        return os.path.relpath(copy, self.output / page.relative_to(DOCS).parent)

    def copied(self, path: Path) -> Path:
        """The copy of a file of the repository in the site."""
        copy = self.output / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        return copy

    def example(self, page: Path, code: str) -> str:
        """Code of a page: a link to a report that it names and that is built, or the code as it
        is."""
        match = PAGE.fullmatch(code)
        if match is None or not (report := ROOT / match[1]).exists():
            return code
        copy = self.copied(report)

        def leading(link: re.Match[str]) -> str:
            target = (report.parent / unquote(link[0])).resolve()
            if target.suffix in BUILT and target.exists():
                self.copied(target)
                return link[0]
            return address(self.source, target)

        copy.write_text(IN_PAGE.sub(leading, report.read_text(encoding="utf-8")), encoding="utf-8")
        return f"[{report.parent.name}]({self.beside(page, copy)})"

    def notebook(self, path: Path, place: Path) -> None:
        """Write a notebook with its outputs as a page, its pictures beside it."""
        import nbformat
        from nbconvert import MarkdownExporter

        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = self.page(path, cell.source)
        resources = {"output_files_dir": f"{place.stem}_files"}
        text, resources = MarkdownExporter().from_notebook_node(notebook, resources)
        place.write_text(text, encoding="utf-8")
        for name, content in resources["outputs"].items():
            (place.parent / name).parent.mkdir(exist_ok=True)
            (place.parent / name).write_bytes(content)


if __name__ == "__main__":
    Site().prepare()
