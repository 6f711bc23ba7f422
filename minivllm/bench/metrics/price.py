"""What tokens cost, at the prices of `measure.price`."""

from __future__ import annotations

from typing import Any

from minivllm.bench.hardware.readings import Energy
from minivllm.bench.records.record import Cost, Metrics

JOULES_PER_KWH = 3.6e6


def cost(price: dict[str, Any], measured: Metrics, energy: Energy) -> Cost:
    """Money per million output tokens: device-hours, and kilowatt-hours where energy was read."""
    hour, kwh = price.get("device_hour"), price.get("kwh")
    unknown = hour is None and (kwh is None or energy.joules is None)
    if not measured.output_tokens or not measured.duration_s or unknown:
        return Cost()
    money = (hour or 0.0) * measured.duration_s / 3600
    money += (kwh or 0.0) * (energy.joules or 0.0) / JOULES_PER_KWH
    return Cost(price.get("currency"), 1e6 * money / measured.output_tokens)


def remarks(price: dict[str, Any], energy: Energy) -> list[str]:
    """What has to be known to compare the cost with another machine's."""
    if price.get("device_hour") is None or price.get("kwh") is None or energy.joules is not None:
        return []
    return [f"the cost is of device-hours alone, since no energy was read ({energy.reason})"]
