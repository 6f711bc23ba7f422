"""task=quality: what a configuration costs in quality, without measuring its speed."""

from __future__ import annotations

from typing import Any

from minivllm.tasks import bench


def run(config: dict[str, Any]) -> int:
    """Make a record whose `quality` is filled and whose metrics are empty; a table and a report, as
    of bench.

    Everything around it is the benchmark's: the worker and its timeout, records and their
    identities, sweeps that resume. The session sees by the task that there is no load to measure.

    Args:
        config: the resolved configuration; of its settings `quality` says what to measure.

    Returns:
        0 if every measurement is ok, else 1.

    Raises:
        BadInput: this cannot be measured, random weights above all.
        KeyboardInterrupt: Ctrl-C; what had finished is kept.
    """
    return bench.run(config)
