"""The glossary is what classes of metrics and fields of the record say of themselves."""

from __future__ import annotations

import pytest

from minivllm.bench.metrics.glossary import glossary, unit_of
from minivllm.bench.metrics.metrics import METRICS


def test_every_figure_says_what_it_is_how_it_is_computed_and_a_case_by_hand() -> None:
    for entry in glossary():
        words = (entry.description, entry.formula, entry.example, entry.unit)
        assert all(words), entry
        assert entry.direction in ("lower", "higher", None)
        assert "Formula" not in " ".join(words) and "Example" not in " ".join(words)


def test_figures_outside_the_metrics_are_fields_of_the_record() -> None:
    known = {figure.name: figure for figure in glossary()[len(METRICS) :]}
    waste = known["memory.kv_waste"]
    assert (waste.unit, waste.direction) == ("share", "lower")
    assert waste.formula.startswith("wasted slots / allocated slots")
    assert {name.partition(".")[0] for name in known} >= {"energy", "cost", "jobs", "quality"}
    assert "memory.weights_16bit" not in known  # it has no formula


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("metrics.itl_ms.p50", "ms"),
        ("metrics.attainment.all", "share"),
        ("metrics.steady.output_tokens_per_s", "tokens/s"),
        ("memory.weights_16bit", "bytes"),
        ("jobs.client_lag_ms.mean", "ms"),
        ("devices.output_tokens_per_s", "tokens/s"),
        ("breakdown.steps", ""),
        ("config.model.name", ""),
    ],
)
def test_a_figure_has_the_unit_of_its_field(name: str, unit: str) -> None:
    assert unit_of(name) == unit
