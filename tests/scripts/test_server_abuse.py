"""scripts/server_abuse.py, with a few clients of each kind."""

from __future__ import annotations

import asyncio

import pytest

from tests.forked import fork_known
from tests.scripts.load import load_script

pytest.importorskip("uvicorn")
abuse = load_script("server_abuse")


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers are forks."""
    fork_known(monkeypatch)


def test_clients_that_leave_or_do_not_read_leave_nothing_behind() -> None:
    with abuse.server(*abuse.PATIENT) as one:
        left = asyncio.run(abuse.disconnects(one, 12))
        assert left["left"] > 0 and left["blocks_free_after_ms"]["n"] == 12
        cut = asyncio.run(abuse.slow_readers(one, 2))
        assert cut["cut_off"] == 2
        asyncio.run(abuse.until_idle(one.port))


def test_every_request_of_an_overload_has_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abuse, "OUTPUT_LEN", 64)  # a quarter of it, so that times may be short
    with abuse.server(*abuse.NARROW) as one:
        found = asyncio.run(abuse.overload(one, 0.6, 1.0))
    assert set(found["statuses"]) == {"200", "429"}
    assert sum(found["statuses"].values()) == found["arrivals"]
    assert found["ttft_ms_served"]["n"] == found["statuses"]["200"]
