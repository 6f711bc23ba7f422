"""Waiting for what another process does."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 60.0


def wait_until(happens: Callable[[], object]) -> bool:
    """Whether it happens before patience is at an end."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if happens():
            return True
        time.sleep(0.02)
    return False
