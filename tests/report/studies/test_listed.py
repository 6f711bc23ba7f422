"""A study of the user's own is one class and one option file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minivllm.bench.records.identity import cell_id
from minivllm.config.compose import compose
from minivllm.errors import BadInput
from minivllm.experiments.ending import conclude
from minivllm.experiments.plan import essential
from minivllm.report.studies.listed import STUDIES, configured
from tests.report.pagereader import Page
from tests.report.synthetic import make_record, write

SOURCE = '''
from minivllm.report.figures.chart import Chart, Panel, Series
from minivllm.report.studies.base import Study


class Loading(Study):
    """How long each cell took to load."""

    name = "of_mine"
    title = "How long did mine take to load?"
    figure_names = ("of_mine",)

    def __init__(self, least_s: float = 0.0) -> None:
        self.least_s = least_s

    def find(self, inputs):
        times = {cell.label: cell.mean("cold.load_s") or 0.0 for cell in inputs.cells}
        return {label: s for label, s in times.items() if s >= self.least_s} or None

    def statements(self, result, inputs):
        return [f"{label} loaded in {s:g} s." for label, s in result.items()]

    def figures(self, result, inputs):
        rows = [float(row) for row in range(len(result))]
        series = Series("loading", "#0072B2", [*result.values()], rows, names=[*result])
        panel = Panel("", "seconds", "", [series], rows=[*result])
        alt = "A point for the seconds that each cell took to load."
        return [Chart("of_mine", self.title, alt, "A point a cell.", [("", [panel])])]
'''
OPTION = """
# Adds how long loading took
studies:
  of_mine:
    _target_: my_study.Loading
    least_s: 0.5 # seconds; faster cells are left out
"""


@pytest.fixture
def own(user_dir: Path, plug_in: Callable[[str, str, str], None]) -> str:
    """The argument that brings the user's option files."""
    (user_dir / "my_study.py").write_text(SOURCE)
    plug_in("report", "of_mine", OPTION.lstrip())
    return f"--config-dir={user_dir / 'conf'}"


def measured(folder: Path) -> Path:
    records = [make_record(quant, run_id=quant) for quant in ("fp16", "nf4")]
    for record, seconds in zip(records, (0.25, 2.0), strict=True):
        record.cold.load_s = seconds
    return write(folder, records, parquet=False)


def test_help_finds_it(cli: Callable[..., Any], own: str) -> None:
    assert "report" in (message := cli(own, "--help").out) and "of_mine" in message
    # lines are as wide as the terminal
    shown = " ".join(cli(own, "+report=of_mine", "--help").out.split())
    assert "report=of_mine: Adds how long loading took" in shown
    assert "report.studies.of_mine.least_s=0.5" in shown and "faster cells are left out" in shown


@pytest.mark.usefixtures("without_figures")
def test_the_page_draws_it(cli: Callable[..., Any], own: str) -> None:
    measured(Path("runs"))
    runs = "runs=[runs]"
    done = cli(own, "task=report", runs, "+report=of_mine", "name=mine")
    assert done.code == 0, done.err
    page = Page(Path("reports/mine/index.html"))
    assert page.text.index("Results: how fast is each?") < page.text.index(
        "How long did mine take to load?"
    )
    assert "nf4 loaded in 2 s." in page.text and "fp16 loaded" not in page.text
    assert 'id="figure-of_mine"' in page.source and 'data-chart="of_mine"' in page.source
    assert Path("reports/mine/of_mine.png").read_bytes().startswith(b"\x89PNG")
    cli(
        own, "task=report", runs, "+report=of_mine", "report.studies.of_mine.least_s=9", "name=mine"
    )
    assert "did mine take" not in Page(Path("reports/mine/index.html")).text
    assert not Path("reports/mine/of_mine.png").exists()


def test_its_knobs_have_types(cli: Callable[..., Any], own: str) -> None:
    measured(Path("runs"))
    for command in (
        ["task=report", "runs=[runs]"],
        ["engine=simulated", "engine.bandwidth_gb_s=1", "engine.tflops=1"],
    ):
        done = cli(own, *command, "+report=of_mine", "report.studies.of_mine.least_s=abc")
        assert done.code == 2 and done.err.count("\n") == 1, done.err
        assert (
            "report.studies.of_mine.least_s='abc' must be a number, says my_study.Loading"
            in done.err
        )


@pytest.mark.usefixtures("without_figures", "own")
def test_the_end_of_a_task_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"report": {"studies": {"of_mine": {"_target_": "my_study.Loading"}}}}
    assert conclude(measured(tmp_path / "runs"), tmp_path / "out", config) is not None
    assert "nf4 loaded in 2 s.\n" in capsys.readouterr().out
    assert (tmp_path / "out" / "of_mine.png").exists()


def test_it_changes_nothing_that_is_measured(own: str) -> None:
    plain, asked = compose([]), compose(["+report=of_mine"], own.partition("=")[2])
    assert asked["report"]["studies"]["of_mine"]["least_s"] == 0.5
    assert cell_id(plain, "f") == cell_id(asked, "f")
    assert essential(["quant=nf4", "+report=of_mine", "report.studies.of_mine.least_s=1"]) == [
        "quant=nf4"
    ]


def test_what_is_no_study_is_bad_input() -> None:
    assert configured({}) == STUDIES
    node = {"mine": {"_target_": "pathlib.Path"}}
    with pytest.raises(BadInput, match=r"report\.studies\.mine: pathlib\.Path is no subclass of"):
        configured({"report": {"studies": node}})
    with pytest.raises(BadInput, match="must name a class each"):
        compose(["+report.studies.mine=1"])


def test_every_study_has_a_name_and_a_question_of_its_own() -> None:
    assert (
        len({study.name for study in STUDIES})
        == len({study.title for study in STUDIES})
        == len(STUDIES)
    )
    assert all(study.title.endswith("?") for study in STUDIES)
