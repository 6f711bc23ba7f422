"""What tokens cost, at the prices of `measure.price`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minivllm.bench.hardware.readings import DeviceEnergy, Energy
from minivllm.bench.records.figures import Cost, DeviceFigures, Devices, Metrics

JOULES_PER_KWH = 3.6e6


def cost(price: dict[str, Any], measured: Metrics, energy: Energy, devices: int = 1) -> Cost:
    """Money per million output tokens: device-hours, and kilowatt-hours where energy was read.

    Args:
        price: `measure.price`; a device-hour is one of each device.
        measured: gives the tokens and the hours.
        energy: of all devices.
        devices: how many there are.
    """
    hour, kwh = price.get("device_hour"), price.get("kwh")
    unknown = hour is None and (kwh is None or energy.joules is None)
    if not measured.output_tokens or not measured.duration_s or unknown:
        return Cost()
    money = (hour or 0.0) * devices * measured.duration_s / 3600
    money += (kwh or 0.0) * (energy.joules or 0.0) / JOULES_PER_KWH
    return Cost(price.get("currency"), 1e6 * money / measured.output_tokens)


def by_device(
    each: Sequence[tuple[str | None, DeviceEnergy]],
    measured: Metrics,
    whole: Metrics,
    price: dict[str, Any],
) -> Devices | None:
    """Throughput by device, and what each of several devices took; None where there is one.

    Args:
        each: names and energies.
        measured: gives throughput.
        whole: of all that was sent, which energy and cost are of.
        price: `measure.price`.
    """
    if not each:
        return None

    def share(rate: float | None) -> float | None:
        return None if rate is None else rate / len(each)

    return Devices(
        count=len(each),
        output_tokens_per_s=share(measured.output_tokens_per_s),
        total_tokens_per_s=share(measured.total_tokens_per_s),
        requests_per_s=share(measured.requests_per_s),
        each=[
            DeviceFigures(
                name=name,
                joules=energy.joules,
                mean_watts=energy.mean_watts,
                cost_per_million_output_tokens=cost(
                    price, whole, Energy(joules=energy.joules)
                ).per_million_output_tokens,
            )
            for name, energy in each
        ],
    )


def remarks(price: dict[str, Any], energy: Energy) -> list[str]:
    """What has to be known to compare the cost with another machine's."""
    if price.get("device_hour") is None or price.get("kwh") is None or energy.joules is not None:
        return []
    return [f"the cost is of device-hours alone, since no energy was read ({energy.reason})"]
