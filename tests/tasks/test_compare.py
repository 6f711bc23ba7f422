"""task=compare: exit codes, and what is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minivllm.report.studies.standalone import comparison
from tests.report.pagereader import Page
from tests.report.synthetic import make_record, write

Cli = Callable[..., Any]


@pytest.fixture
def runs(cli: Cli) -> Callable[[str, float], None]:
    """Write a run of one cell and six blocks, its throughput times a factor."""

    def make(name: str, factor: float = 1.0) -> None:
        records = [make_record("int8", "continuous", block, sweep=name) for block in range(6)]
        for record in records:
            assert record.metrics.output_tokens_per_s
            record.metrics.output_tokens_per_s *= factor
            record.provenance["started_at"] = (
                f"2025-0{1 + len(name)}-01T10:{record.block:02d}:00+0000"
            )
        write(Path("runs"), records, parquet=False)

    return make


def test_a_regression(cli: Cli, runs: Callable[[str, float], None]) -> None:
    runs("old", 1.0)
    runs("newer", 0.8)
    done = cli("task=compare", "runs=[old,newer]")
    assert done.code == 1 and "Regression of output_tokens_per_s in 1 of 1" in done.out
    written = Path("reports/newer-against-old/compare.md").read_text()
    assert "slower" in written and "two samples" in written
    assert Path("reports/newer-against-old/compare.png").read_bytes().startswith(b"\x89PNG")
    page = Page(Path("reports/newer-against-old/index.html"))
    assert "Did output tokens/s get worse from old to newer?" in page.text
    assert "slower" in page.text and "Regression of output_tokens_per_s in 1 of 1" in page.text
    files = [link for link in page.attributes("a", "href") if not link.startswith("#")]
    assert files and all((Path("reports/newer-against-old") / file).is_file() for file in files)
    assert cli("task=compare", "runs=[newer,old]", "name=turned").code == 0
    assert Page(Path("reports/index.html")).text.count("No regression") == 1
    assert "faster" in Path("reports/turned/compare.md").read_text()
    assert cli("task=compare", "runs=[old,newer]", "task.threshold=0.5").code == 0


def test_nothing_in_common(
    cli: Cli, runs: Callable[[str, float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "MOST_CHARACTERS", 99)  # as of one that names many knobs
    runs("old", 1.0)
    record = make_record("nf4", "sequential", sweep="other")
    write(Path("runs"), [record], parquet=False)
    done = cli("task=compare", "runs=[old,other]")
    assert (
        done.code == 3
        and "no cell in common, since they differ in quant: int8 / nf4 and batching: continuous "
        "/ sequential; to compare options use -m or +ablation"
        in done.out
    )
    assert not Path("reports/other-against-old/compare.png").exists()
    page = Page(Path("reports/other-against-old/index.html"))
    assert "Not comparable: the runs have no cell in common." in page.text


def test_records_that_cannot_be_read_are_counted(
    cli: Cli, runs: Callable[[str, float], None]
) -> None:
    runs("old", 1.0)
    runs("newer", 1.0)
    next(Path("runs/old").glob("*/record.json")).write_text("{")
    done = cli("task=compare", "runs=[old,newer]")
    assert done.code == 3 and done.out.startswith(
        "not comparable: 1 unreadable record, such as runs/old/"
    )


@pytest.mark.parametrize(
    "argv", [("task=compare", "runs=[old,old]"), ("task=report", "runs=[old]")]
)
def test_a_report_that_cannot_be_written_is_one_line(
    cli: Cli, runs: Callable[[str, float], None], argv: tuple[str, ...]
) -> None:
    runs("old", 1.0)
    Path("taken").mkdir()
    Path("taken/mine").write_text("a file")
    done = cli(*argv, "reports_dir=taken", "name=mine")
    assert done.code == 2 and done.err.startswith(
        "error: reports_dir=taken: taken/mine cannot be written to ("
    )
    assert done.err.count("\n") == 1


def test_bad_input(cli: Cli, runs: Callable[[str, float], None]) -> None:
    runs("old", 1.0)
    for argv, message in (
        (["runs=[old]"], "name two runs to compare"),
        (["runs=[old,missing]"], "no records at missing"),
        (["runs=[old,old]", "task.metric=speed"], "metric=speed: no such figure"),
        (["runs=[old,old]", "task.threshold=-1"], "task.threshold"),
    ):
        done = cli("task=compare", *argv)
        assert done.code == 2 and message in done.err and done.err.count("\n") == 1
    assert not Path("reports").exists()
