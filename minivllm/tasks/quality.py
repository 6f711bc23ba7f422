"""task=quality: the quality of a configuration, without its speed."""

from __future__ import annotations

from typing import Any

from minivllm.tasks import bench


def run(config: dict[str, Any]) -> int:
    """Measure quality alone: records with `quality` and without metrics, a table and a report.

    The worker, its timeout, the records, their identities and resumed sweeps are those of
    task=bench; the session skips the load because of the task.

    Args:
        config: the resolved configuration; `quality` says what to measure.

    Returns:
        0 if every measurement is ok, else 1.

    Raises:
        BadInput: the configuration cannot be measured, for example with random weights.
        KeyboardInterrupt: Ctrl-C; finished measurements are kept.
    """
    return bench.run(config)
