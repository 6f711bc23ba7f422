"""Several servers that engine=openai asks in turn: who gets what, and what each of them did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from minivllm import BadInput
from minivllm.bench.workloads.workload import Workload, WorkloadRequest
from minivllm.config.compose import compose
from minivllm.engines.openai.engine import OpenAIEngine
from tests.engines.driving import requests, run
from tests.engines.in_front import engines

pytest.importorskip("aiohttp")
Make = Callable[..., OpenAIEngine]


@pytest.fixture
def make() -> Iterator[Make]:
    """An engine in front of servers, of each of which the settings are given."""
    with engines() as build_one:
        yield lambda each, *overrides: build_one(each, overrides, {})


def test_servers_are_asked_in_turn_and_each_is_counted(make: Make) -> None:
    engine = make([{}, {"context": 300}, {}])
    assert engine.info.max_model_len == 300 and engine.info.max_num_seqs == 3 * 256
    load = requests([(70, 71, 72)] * 7, [3] * 7)
    traces = run(engine, load)
    assert [trace.token_ids for trace in traces] == [[5, 6, 7]] * 7
    live = engine.liveness()
    parallel = live["parallel"]
    assert parallel["replicas"] == 3 and parallel["requests"] == "3 | 2 | 2"
    assert parallel["share"] == "0.429 | 0.286 | 0.286" and parallel["failures"] == "0 | 0 | 0"
    assert live["engine"]["requests"] == 7 and live["cache"]["cached_prompt_tokens"] == 21
    assert parallel["hit_rate"] == "1.000 | 1.000 | 1.000"  # each says that all was cached
    assert str(parallel["placed_at"]).count("http://127.0.0.1:") == 3
    engine.reset()
    assert engine.liveness()["parallel"]["requests"] == "0 | 0 | 0"
    assert engine.liveness()["parallel"]["hit_rate"] == "unknown | unknown | unknown"


def test_failures_are_those_of_one_server(make: Make) -> None:
    engine = make([{}, {}])
    broken = engine._workers.clients[1]
    broken._path = "/nowhere"
    traces = run(engine, requests([(70,)] * 4, [3] * 4))
    assert [trace.completed for trace in traces] == [True, False, True, False]
    assert engine.liveness()["parallel"]["failures"] == "0 | 2"


def test_all_that_silent_servers_have_is_given_up(make: Make) -> None:
    engine = make([{"events": ["silence"]}] * 2, "engine.idle_timeout_s=2")
    traces = run(engine, requests([(70,)] * 4, [3] * 4))
    assert {trace.status for trace in traces} == {"aborted"}
    assert all("no token of any request" in str(trace.error) for trace in traces)
    assert engine.liveness()["parallel"]["failures"] == "2 | 2"


def test_a_session_stays_with_its_server(make: Make) -> None:
    engine = make([{}, {}], "engine.router=session")
    load = Workload(
        tuple(WorkloadRequest(f"r{i}", (70, 71), 2, True, session=f"s{i % 2}") for i in range(8))
    )
    assert all(trace.completed for trace in run(engine, load))
    parallel = engine.liveness()["parallel"]
    assert parallel["requests"] == "4 | 4" and parallel["session_matches"] == 6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"models": '{"data": [{"id": "other"}]}'}, "engine.model=small: http.*it serves other"),
        ({"fault": "refuse"}, r"engine\.url=http://127.*this model is not for you"),
    ],
)
def test_each_server_must_do_what_the_first_does(
    make: Make, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        make([{}, settings])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engine.url=[http://a/v1,http://a/v1]"], "engine.url.* names a server twice"),
        (["engine.url=[http://a,b]"], "engine.url.*must begin with http"),
        (["engine.url=[]"], "engine.url"),
        (["engine.url=[http://a,http://b]", "engine.command=vllm"], "engine.command.*starts one"),
        (["engine.router=prefix_aware"], "engine.router"),
    ],
)
def test_what_is_no_list_of_servers(overrides: list[str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        compose(["engine=openai", *overrides])
