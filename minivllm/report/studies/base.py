"""What a study is: one question that a report answers from its records, with its words, tables,
figures and place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

from minivllm.report.figures.chart import Chart
from minivllm.report.figures.render import Described, Plot
from minivllm.report.html import Conclusion
from minivllm.report.inputs import ReportInputs

if TYPE_CHECKING:
    from rich.table import Table

Result = TypeVar("Result")  # what a study finds, which its other methods are given


class Study(Generic[Result]):
    """One question that a report answers from its records.

    A report loops over a list of studies and shows those that find something. `find` is all that a
    study must have; what else it does not override is left out. A study of the user's own is named
    in `report.studies`, and its knobs are the arguments of its constructor.

    Attributes:
        name: of its section on the page, unlike that of any other.
        title: heading of the section.
        leads: whether records are made for this study, see `leads_page`.
        template: file in templates/sections that shows what `section` returns.
        figure_names: of all figures that it may draw, so that those of an earlier report are
            removed.
        file_names: of all files that it may write, likewise.
    """

    name: ClassVar[str]
    title: ClassVar[str]
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
        """Title of a page that this study leads, see `sections.heading`; empty: that of a sweep."""
        return ""

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
        """Text files beside the page, by name."""
        return {}

    def figures(self, result: Result, inputs: ReportInputs) -> Iterable[Described | None]:
        """Descriptions of its figures; None for one that has nothing to show."""
        return ()

    def section(
        self, result: Result, inputs: ReportInputs, plots: list[Plot], out_dir: Path
    ) -> Any:
        """Its section as plain data for its template; `plots` are its figures."""
        return {"statements": self.statements(result, inputs) or [], "plots": plots, "tables": []}
