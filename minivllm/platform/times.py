"""Times of day as records and files write them: one way to write, one to read and to order."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

UNKNOWN_S = -math.inf  # before every moment that is known


def now() -> str:
    """The present millisecond in UTC, in ISO 8601: blocks of measurements that last less than a
    second have an order, too."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def moment(text: str) -> float:
    """Seconds since 1970 of a date in ISO 8601; one without a zone is taken as UTC, since in this
    machine's own an hour might occur twice, or never.

    Raises:
        ValueError: any other text.
    """
    date = datetime.fromisoformat(text.strip())
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


def moment_of(value: Any) -> float:
    """The same of any value of a record, for sorting: `UNKNOWN_S` where it is no date."""
    try:
        return moment(value) if isinstance(value, str) else UNKNOWN_S
    except ValueError:
        return UNKNOWN_S


def minute(moment_s: float) -> str:
    """A moment in UTC as people read it, to the minute; empty where it is unknown."""
    if not math.isfinite(moment_s):
        return ""
    return datetime.fromtimestamp(moment_s, UTC).strftime("%Y-%m-%d %H:%M")
