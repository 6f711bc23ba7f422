"""The table of GGUF's types in docs/reference/quantization.md is what the code does."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from minivllm.models.load.gguf.formats import FLOATS, READ
from tests.scripts.load import load_script

TABLE = Path(__file__).resolve().parents[2] / "reports" / "examples" / "cpu" / "gguf_types.md"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("gguf_types")


def test_the_table_is_what_is_measured_now_and_every_error_is_0(script: ModuleType) -> None:
    assert TABLE.read_text() == script.table()
    rows = [line.strip("|").split(" | ") for line in TABLE.read_text().splitlines()[2:]]
    assert {row[2] for row in rows} == {"0"}
    assert sorted(", ".join(row[0].strip() for row in rows).split(", ")) == sorted(
        {*READ} - {*FLOATS}
    )


def test_an_error_is_seen(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    right = script.dequantized

    def wrong(raw: torch.Tensor, form: str) -> torch.Tensor:
        values: torch.Tensor = right(raw, form).float()
        values[values.isfinite()] += 1
        return values

    monkeypatch.setattr(script, "dequantized", wrong)
    assert script.largest_error("Q8_0") == pytest.approx(1, rel=0.01)
    monkeypatch.setattr(script, "dequantized", lambda raw, form: right(raw, form).nan_to_num())
    assert script.largest_error("Q8_0") == float("inf")
