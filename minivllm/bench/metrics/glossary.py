"""What every figure of a record is: of a timed metric its class says it, of any other its field."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from typing import NamedTuple

from minivllm.bench.metrics.metrics import METRICS
from minivllm.bench.records.record import Record
from minivllm.platform.described import Direction, Words, field_words, parts, words


class Figure(NamedTuple):
    """One entry of the glossary: a figure of the record, and what it is."""

    name: str  # the field's dotted name in the record; of a timed metric without `metrics.`
    unit: str
    direction: Direction
    description: str
    formula: str
    example: str


@cache
def glossary() -> tuple[Figure, ...]:
    """Every figure that has a formula: the timed metrics, then the record's other parts."""
    timed = [
        Figure(metric.name, metric.unit, metric.direction, *words(metric.__doc__ or ""))
        for metric in METRICS
    ]
    return (*timed, *_described())


def _described() -> Iterator[Figure]:
    for part, cls in parts(Record).items():
        described = field_words(cls)
        for item in fields(cls):
            if (text := described.get(item.name, Words(""))).formula:
                about = item.metadata
                yield Figure(f"{part}.{item.name}", about["unit"], about["direction"], *text)


@cache
def unit_of(name: str) -> str:
    """Unit of a figure by its dotted name in the record, such as `metrics.itl_ms.p50`; empty where
    it has none."""
    timed = {f"metrics.{metric.name}": metric.unit for metric in METRICS}
    cls: type | None = Record
    steps = name.split(".")
    found = ""
    for depth, step in enumerate(steps, start=1):
        item = next((item for item in fields(cls) if item.name == step), None) if cls else None
        found = timed.get(".".join(steps[:depth])) or (item and item.metadata.get("unit")) or found
        cls = parts(cls).get(step) if cls else None
    return found
