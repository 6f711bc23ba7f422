"""scripts/server_abuse.py, with a few clients of each kind."""

from __future__ import annotations

import asyncio

import pytest

from tests.forked import fork_known
from tests.scripts.load import load_script

pytestmark = pytest.mark.real  # whole servers

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
    assert found["retry_after_s"]["n"] == found["statuses"]["429"]


def test_a_soak_fills_the_cache_first_and_says_what_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abuse, "NUM_BLOCKS", 300)
    monkeypatch.setattr(abuse, "FILLING", 1.2)
    with abuse.server(*abuse.PATIENT, "cache.num_blocks=300") as one:
        filled = asyncio.run(abuse.fill(one))
        known = asyncio.run(abuse.figures(one.port))
    assert set(filled["before"]) == set(filled["after"]) == {"http", "engine"}
    assert known["prefix_cache_queries_total"] >= 300 * 16
    rounds = [{"memory_mb": {"http": 100, "engine": engine}} for engine in (200, 230, 216)]
    abuse.require_flat(rounds)
    with pytest.raises(RuntimeError, match=r"memory of engine has grown from 200 MB .* after 4$"):
        abuse.require_flat([*rounds, {"memory_mb": {"http": 100, "engine": 217}}])
