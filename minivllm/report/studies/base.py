"""What a study is: one question that a report answers from its records, with its words, tables,
figures and place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar, cast

from minivllm.report.figures.chart import Chart
from minivllm.report.figures.render import Described, Plot
from minivllm.report.html import Conclusion
from minivllm.report.inputs import ReportInputs
from minivllm.report.spreadsheet import markdown_table, markdown_text

if TYPE_CHECKING:
    from rich.table import Table

Result = TypeVar("Result")  # what a study finds, which its other methods are given


class PageTable(NamedTuple):
    """A table of words and figures, in a section and in a study's Markdown file."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


class Study(Generic[Result]):
    """One question that a report answers from its records.

    A report loops over a list of studies and shows those that find something. `find` is all that a
    study must have; what else it does not override is left out. A study of the user's own is named
    in `report.studies`, and its knobs are the arguments of its constructor.

    Attributes:
        name: of its section on the page, unlike that of any other.
        title: heading of the section.
        page_title: of a page that this study leads, with {model} and {knobs} where these are to be
            named; empty: that of a sweep.
        leads: whether records are made for this study, see `leads_page`.
        template: file in templates/sections that shows what `section` returns.
        figure_names: of all figures that it may draw, so that those of an earlier report are
            removed.
        file_names: of all files that it may write, likewise.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    page_title: ClassVar[str] = ""
    leads: ClassVar[bool] = False
    template: ClassVar[str] = "study"
    figure_names: ClassVar[tuple[str, ...]] = ()
    file_names: ClassVar[tuple[str, ...]] = ()

    def find(self, inputs: ReportInputs) -> Result | None:
        """What the records say; None where they are not about this question."""
        raise NotImplementedError

    def finding(self, inputs: ReportInputs) -> Result | None:
        """The same, worked out once for each report."""
        if self.name not in inputs.findings:
            inputs.findings[self.name] = self.find(inputs)
        return cast("Result | None", inputs.findings[self.name])

    def leads_page(self, result: Result, inputs: ReportInputs) -> bool:
        """Whether its section stands first. The first study of which that is so answers the
        question of the page; others stand below the results."""
        return self.leads

    def question(self, result: Result, inputs: ReportInputs) -> str:
        """`page_title`, unless it depends on the result."""
        return self.page_title

    def conclusion(self, result: Result, inputs: ReportInputs) -> Conclusion:
        """Headline of a page that this study leads."""
        headline, *lines = self.statements(result, inputs) or [self.title]
        return Conclusion(headline, lines)

    def picture(self, result: Result, inputs: ReportInputs) -> Chart | None:
        """What stands beside the headline of a page that this study leads, by `figures.opening`;
        None: what stands beside that of a sweep."""
        return None

    def statements(self, result: Result, inputs: ReportInputs) -> list[str] | None:
        """Sentences for the terminal; None: those of a sweep, where this study leads."""
        return None

    def tables(self, result: Result, inputs: ReportInputs) -> list[Table]:
        """Tables for the terminal."""
        return []

    def replaces_summary(self, result: Result, inputs: ReportInputs) -> bool:
        """Whether its tables say all that the terminal's other tables would."""
        return False

    def files(self, result: Result, inputs: ReportInputs) -> Mapping[str, str]:
        """Text files beside the page, by name: NAME.md, where `file_names` has it, is what the
        section says, without its figures."""
        name = f"{self.name}.md"
        if name not in self.file_names:
            return {}
        tables = self.page_tables(result, inputs)
        parts = [f"* {markdown_text(line)}\n" for line in self.section_statements(result, inputs)]
        for title, headings, rows in tables:
            named = f"\n{markdown_text(title)}\n" if len(tables) > 1 else ""
            parts.append(f"{named}\n{markdown_table([], list(headings), rows)}")
        return {name: "".join(parts).lstrip("\n")}

    def figures(self, result: Result, inputs: ReportInputs) -> Iterable[Described | None]:
        """Descriptions of its figures; None for one that has nothing to show."""
        return ()

    def section_statements(self, result: Result, inputs: ReportInputs) -> list[str]:
        """Sentences of its section, those for the terminal unless it has others."""
        return self.statements(result, inputs) or []

    def page_tables(self, result: Result, inputs: ReportInputs) -> Sequence[PageTable]:
        """Tables of its section."""
        return ()

    def section(
        self, result: Result, inputs: ReportInputs, plots: list[Plot], out_dir: Path
    ) -> Any:
        """Its section as plain data for its template; `plots` are its figures."""
        tables = [table._asdict() for table in self.page_tables(result, inputs)]
        statements = self.section_statements(result, inputs)
        return {"statements": statements, "plots": plots, "tables": tables}
