"""The page, what it asks, and who may."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import FastAPI

from minivllm.bench.hardware.gpu import NullGpu
from minivllm.engine.options import SamplingParams
from minivllm.processes.messages import Ready
from minivllm.serving.app import build_app
from minivllm.serving.options import ServeOptions, is_loopback
from minivllm.serving.service import EngineService
from tests.serving.plain import call_json
from tests.serving.raw import ask
from tests.serving.running import KEY, RunningServer

WITH_KEY = {"authorization": f"Bearer {KEY}"}


@pytest.mark.parametrize("path", ["/", "/view"])
def test_the_page_loads_nothing_and_cannot_be_framed(
    server: RunningServer, guarded: RunningServer, path: str
) -> None:
    for one in (server, guarded):  # the page itself has no data
        answer = ask(one.url, path, method="GET")
        assert answer.status == 200 and answer.headers["content-type"].startswith("text/html")
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert b"default-src 'none'" in answer.body and b"tiny" not in answer.body


def test_what_a_page_is_told(server: RunningServer, guarded: RunningServer) -> None:
    status, info = call_json(f"{server.url}/view/info")
    assert status == 200 and info == {
        **{"key": False, "model": "tiny", "block_size": 16, "max_model_len": 2048},
        **{"load": True, "text": True, "chat": True},
    }
    for headers in ({}, {"authorization": "Bearer wrong"}):
        assert ask(guarded.url, "/view/info", headers=headers, method="GET").body == b'{"key":true}'
    told = ask(guarded.url, "/view/info", headers=WITH_KEY, method="GET").body
    assert b'"load":false' in told and b'"model":"tiny"' in told


def test_commands_need_the_key_and_a_load_needs_leave(guarded: RunningServer) -> None:
    assert ask(guarded.url, "/view/load", {"rate": 1}).status == 401
    refused = ask(guarded.url, "/view/load", {"rate": 1}, WITH_KEY)
    assert refused.status == 403 and "task.view_load" in refused.error["message"]


def test_a_replica_that_is_not_there_cannot_be_watched(
    server: RunningServer, guarded: RunningServer
) -> None:
    assert ask(guarded.url, "/view/replica", {"number": 0}).status == 401
    assert ask(server.url, "/view/replica", {"number": -1}).status == 400
    refused = ask(server.url, "/view/replica", {"number": 1})
    assert refused.status == 400 and "1 replica" in refused.error["message"]


@pytest.mark.parametrize("path", ["/view/load", "/reset_prefix_cache"])
def test_pages_of_other_sites_cannot_command(server: RunningServer, path: str) -> None:
    port = server.url.rpartition(":")[2]
    rebound = {"origin": f"http://evil.example:{port}", "host": f"evil.example:{port}"}
    for headers in ({"origin": "http://evil.example"}, {"origin": "null"}, rebound):
        assert ask(server.url, path, {"rate": 0}, headers).status == 403
    plain = {"content-type": "text/plain"}
    assert ask(server.url, path, b'{"rate": 0}', plain).status == 415
    own = {"origin": server.url, "host": server.url.removeprefix("http://")}
    assert ask(server.url, path, {"rate": 0}, own).status == 200


@pytest.mark.parametrize(
    ("knobs", "allowed"),
    [
        ({}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "::1"}, True),
        ({"api_keys": ["k"]}, False),
        ({"record": True}, False),
        ({"view_load": False}, False),
        ({"view_load": True, "host": "0.0.0.0", "api_keys": ["k"]}, True),
    ],
)
def test_where_a_load_is_allowed(knobs: dict[str, Any], allowed: bool) -> None:
    assert ServeOptions(**knobs).allows_load is allowed


def test_names_of_the_machine_itself() -> None:
    own = ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost", "LOCALHOST.", "a.localhost")
    assert all(map(is_loopback, own))
    assert not any(map(is_loopback, ("", "0.0.0.0", "localhost.example", "127.0.0.1.example")))


def bare_app(**knobs: Any) -> FastAPI:
    """The application of a server without an engine."""
    client = SimpleNamespace(listeners=[], submitted=[], viewers=[])
    ready = Ready(9, 9, (), 9, 9, 9, SamplingParams(), [])
    service = EngineService(ServeOptions(**knobs), cast(Any, client), ready, None, "m")
    return build_app(service, NullGpu())


@pytest.mark.parametrize("view", [True, False])
def test_a_server_may_do_without(view: bool) -> None:
    app = bare_app(view=view)
    paths = app.openapi()["paths"]
    whole = {path for _, path in app.state.of_the_whole}  # what API servers relay
    assert {"/metrics", "/ready", "/openapi.json"} <= whole and ("/ws/events" in whole) is view
    assert not any(path.startswith("/v1") or path == "/ws/generate" for path in whole)
    assert bool({"/view/info", "/view/load"} & paths.keys()) is view and "/health" in paths
    for path, operations in paths.items():  # what may be wrong is part of the description
        for operation in operations.values():
            good, *wrong = sorted(operation["responses"])
            assert good in ("200", "202") and wrong == ["4XX", "5XX"], path
    said = paths["/v1/completions"]["post"]["responses"]["200"]["content"]
    assert {*said} == {"application/json", "text/event-stream"}
    assert {*paths["/metrics"]["get"]["responses"]["200"]["content"]} == {
        *("text/plain", "application/openmetrics-text"),
    }
