"""A server of the embedded model for all tests of a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving.running import RunningServer, serving


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    with serving("decoding=greedy", "decoding.max_tokens=null") as running:
        yield running
