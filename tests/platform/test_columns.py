"""Columns are those of pyarrow's own conversion, which imports pandas."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.platform.columns import column

ROOT = Path(__file__).resolve().parents[2]
KINDS = (
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.booleans(),
    st.text(st.characters(codec="utf-8")),
)
VALUES = st.one_of(
    *(st.lists(st.none() | kind) for kind in KINDS),
    *(st.lists(st.none() | st.lists(kind)) for kind in KINDS),
    st.lists(st.none() | st.lists(st.none() | st.lists(st.integers(0, 9)))),
    st.lists(st.lists(st.integers(0, 9)) | st.lists(st.integers(0, 9)).map(tuple)),
)


@given(VALUES)
def test_a_column_is_pyarrows(values: list[Any]) -> None:
    found, expected = column(values), pyarrow.array(values)
    found.validate(full=True)
    assert found.type == expected.type and found.equals(expected)
    assert found.null_count == expected.null_count and found.to_pylist() == expected.to_pylist()


@pytest.mark.parametrize(
    "values",
    [
        [1, 2.5, None],
        [np.int64(3), 4],
        [{"a": 1}, None],
        [float("nan"), None, -0.0],
        [b"bytes"],
    ],
)
def test_other_values_are_left_to_pyarrow(values: list[Any]) -> None:
    found, expected = column(values), pyarrow.array(values)
    assert found.type == expected.type and str(found) == str(expected)


def test_numbers_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(OverflowError):
        column([2**63])


def test_a_table_is_written_without_pandas(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
import pyarrow.parquet
from minivllm.platform.files import write_parquet
path = Path(sys.argv[1])
write_parquet(path, [{"a": 1, "b": [1.5]}, {"a": None, "c": "x", "d": True}])
with pyarrow.parquet.ParquetFile(path) as file:
    assert file.read().column_names == ["a", "b", "c", "d"]
assert "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "t")], cwd=ROOT, check=True)
