"""What a record says is shown, and neither computed by a spreadsheet nor read as Markdown or
HTML."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.report.spreadsheet import (
    FORMULA,
    csv_table,
    filled,
    markdown_table,
    markdown_text,
)
from tests.report.pagereader import build, table
from tests.report.synthetic import failed, make_record

EVIL = "=1+1|`rm`<script>alert(1)</script>[x](javascript:y)\x1b[31m$\\frac{"


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("=1+1", "'=1+1"),
        ("@SUM(A1)", "'@SUM(A1)"),
        (" \t=cmd", "' \t=cmd"),
        ("-1", "-1"),
        ("+2.5e3", "+2.5e3"),
        ("-1+cmd", "'-1+cmd"),
        (-1.5, "-1.5"),
        (True, "True"),
        (None, ""),
        ("a\x1b[31mb\x00", "ab"),
    ],
)
def test_no_text_is_a_formula_and_numbers_stay_numbers(value: object, written: str) -> None:
    (_, line) = csv.reader(io.StringIO(csv_table(["name"], [[value, "x"]])))
    assert line[0] == written


@given(st.lists(st.text(), min_size=1, max_size=3))
def test_no_cell_begins_as_a_formula(values: list[str]) -> None:
    (line,) = list(csv.reader(io.StringIO(csv_table(values, []), newline="")))
    for cell in line:
        assert not cell.lstrip(" ").startswith(FORMULA) or float(cell) is not None


@given(st.text())
def test_a_row_of_markdown_keeps_its_columns(text: str) -> None:
    head, _, line = markdown_table(["a", "b"], [], [[text, "x"]]).splitlines()
    assert line.startswith("| ") and line.endswith("| x |") and head == "| a | b |"
    unescaped = line.replace("\\\\", "").replace("\\|", "").replace("\\`", "")
    assert unescaped.count("|") == 3 and "`" not in unescaped and "<script" not in unescaped.lower()


def test_columns_without_an_entry_are_left_out() -> None:
    lines = [["a", "–", "–"], ["b", "–", "2"]]
    assert filled(["x", "y", "z"], lines) == (["x", "z"], [["a", "–"], ["b", "2"]])
    assert filled(["x", "y"], []) == (["x", "y"], [])
    assert markdown_table(["x", "y"], ["z"], lines).splitlines() == [
        "| x | z |",
        "| :-- | --: |",
        "| a | – |",
        "| b | 2 |",
    ]


def test_markdown_shows_links_and_tags_as_they_are_written() -> None:
    assert markdown_text("[x](y) <b> p < 0.001 [1, 2]") == "[x\\](y) &lt;b> p < 0.001 [1, 2]"


@pytest.mark.usefixtures("without_figures")
def test_nothing_in_a_report_is_run(tmp_path: Path) -> None:
    records = [make_record("fp16"), make_record("int8", index=1)]
    for record in records:
        record.sweep = "=1+1"
        record.config["model"]["path"] = record.provenance["host"] = (
            EVIL + record.config["choices"]["quant"]
        )
    records.append(failed(make_record("nf4", index=2, sweep="=1+1"), "error", "Broken", EVIL))
    page, out = build(tmp_path, records, parquet=False)
    assert {row["sweep"] for row in table(out).values()} == {"'=1+1"}
    assert any(row["error.message"].startswith("'=1+1|`rm`<script>") for row in table(out).values())
    assert "<script>alert" not in page.source and "alert(1)" in page.text
    text = (out / "table.md").read_text()
    assert (
        "<script>" not in text
        and "\x1b" not in text + page.source
        and "\\|\\`rm\\`&lt;script>" in text
    )


@pytest.mark.usefixtures("painted_anew")
def test_names_that_are_no_formulas_or_glyphs_are_drawn(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    records = [make_record(q, index=i) for i, q in enumerate(("fp16", "int8"))]
    for record, name in zip(records, ("$\\frac{$", "模型 \x07"), strict=True):
        record.config["choices"]["model"] = name
    page, out = build(tmp_path, records)
    assert (out / "throughput.png").stat().st_size > 1000
    assert "$\\frac{$" in page.text and not [w for w in recwarn if "Glyph" in str(w.message)]
