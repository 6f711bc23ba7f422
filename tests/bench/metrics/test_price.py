"""Cost of hours and energy, and what is said where one of them is missing."""

from __future__ import annotations

import pytest

from minivllm.bench.hardware.readings import Energy
from minivllm.bench.metrics.price import cost, remarks
from minivllm.bench.records.figures import Metrics


def test_cost_of_hours_and_energy() -> None:
    measured = Metrics(output_tokens=2_000_000, duration_s=1800)
    result = cost(
        {"device_hour": 4.0, "kwh": 0.5, "currency": "EUR"}, measured, Energy(joules=7.2e6)
    )
    assert result.per_million_output_tokens == pytest.approx((2.0 + 1.0) / 2)
    assert result.currency == "EUR"
    assert cost(
        {"device_hour": 4.0}, measured, Energy()
    ).per_million_output_tokens == pytest.approx(1.0)
    # A price of energy alone says nothing where no energy was read.
    assert cost({"kwh": 0.5}, measured, Energy()).per_million_output_tokens is None
    assert cost({"device_hour": 4.0}, Metrics(), Energy()).per_million_output_tokens is None


def test_a_cost_without_its_energy_is_said_to_be() -> None:
    both = {"device_hour": 4.0, "kwh": 0.5}
    assert remarks(both, Energy(joules=1.0)) == remarks({"device_hour": 4.0}, Energy()) == []
    assert remarks({"kwh": 0.5}, Energy()) == []  # there is no cost
    (message,) = remarks(both, Energy(reason="no counter"))
    assert "device-hours alone" in message and "no counter" in message
