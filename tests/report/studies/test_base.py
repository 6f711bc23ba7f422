"""What a study says that leads its page, from `find` and a few sentences alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from minivllm.experiments.ending import conclude
from minivllm.report.inputs import ReportInputs, read
from minivllm.report.page import write_report
from minivllm.report.studies.base import Study
from minivllm.report.studies.listed import STUDIES, findings, leading
from tests.report.pagereader import Page
from tests.report.synthetic import make_record, write

pytestmark = pytest.mark.usefixtures("without_figures")


class Counting(Study[int]):
    """How many cells there are."""

    name = "counting"
    title = "How many cells are there?"
    leads = True
    file_names = ("counting.txt",)
    asked = 0

    def find(self, inputs: ReportInputs) -> int | None:
        Counting.asked += 1
        return len(inputs.cells) if len(inputs.cells) > 1 else None

    def question(self, result: int, inputs: ReportInputs) -> str:
        return "How many cells are there of {model}?"

    def statements(self, result: int, inputs: ReportInputs) -> list[str]:
        return [f"There are {result} cells.", "They are few."]

    def files(self, result: int, inputs: ReportInputs) -> dict[str, str]:
        return {"counting.txt": f"{result}\n"}


def cells(folder: Path, n: int) -> Path:
    return write(
        folder, [make_record(quant, run_id=quant) for quant in ("fp16", "nf4")[:n]], parquet=False
    )


def test_a_leading_study_answers_the_question_of_the_page(tmp_path: Path) -> None:
    Counting.asked = 0
    inputs, out = read(cells(tmp_path / "two", 2)), tmp_path / "out"
    studies = (*STUDIES, Counting())
    page = Page(write_report(inputs, out, studies))
    assert page.text.index("How many cells are there of qwen3?") < page.text.index(
        "There are 2 cells."
    )
    assert page.text.index("How many cells are there?") < page.text.index("What was measured?")
    assert (out / "counting.txt").read_text() == "2\n"
    lead = leading(findings(inputs, studies), inputs)
    assert lead is not None and lead.study is studies[-1]
    assert Counting.asked == 1  # once for each report
    alone = write_report(read(cells(tmp_path / "one", 1)), out, studies)
    assert "How many cells" not in Page(alone).text and not (out / "counting.txt").exists()


def test_the_terminal_has_its_sentences_in_place_of_those_of_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("minivllm.report.studies.listed.STUDIES", (Counting(),))
    conclude(cells(tmp_path / "runs", 2), tmp_path / "out", {})
    assert "There are 2 cells.\nThey are few.\n" in capsys.readouterr().out
