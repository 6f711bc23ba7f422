"""The error of each method as docs/reference/quantization.md quotes it is what the package's
quantisers do."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from tests.scripts.load import load_script

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "reports" / "examples" / "cpu"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("quantization_error")


def test_the_table_is_that_of_the_record_and_its_ranking_is_sane(script: ModuleType) -> None:
    record = json.loads((EXAMPLES / "quantization_error.json").read_text())
    assert (EXAMPLES / "quantization_error.md").read_text() == script.table(record)
    errors = {script.label(row): row["relative_rms_error"] for row in record["methods"]}
    assert (
        errors["int8"]
        < errors["fp8"]
        < errors["int4 group_size=32"]
        < errors["int4 group_size=256"]
    )
    assert (
        errors["nf4 block_size=64"] < errors["int4 group_size=128"] < errors["nf4 block_size=4096"]
    )
    double = errors["nf4 block_size=64 double_quant"]
    assert errors["nf4 block_size=64"] <= double < 1.01 * errors["nf4 block_size=64"]


def test_the_record_is_what_is_measured_now(script: ModuleType) -> None:
    record = json.loads((EXAMPLES / "quantization_error.json").read_text())
    weights = script.embedded_weights()
    assert record["weights"] == sum(weight.numel() for weight in weights)
    for row in record["methods"]:
        if script.label(row) in (
            "int8",
            "fp8",
            "int4 group_size=128",
            "nf4 block_size=64",
            "nf4 block_size=1024",
        ):
            again = script.measured(row["quant"], row["knobs"], weights)
            assert again["relative_rms_error"] == pytest.approx(row["relative_rms_error"], rel=1e-3)
