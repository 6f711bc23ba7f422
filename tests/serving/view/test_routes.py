"""The page, what it asks, and who may."""

from __future__ import annotations

import json
import threading
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import FastAPI
from websockets.exceptions import ConnectionClosed, InvalidStatus

from minivllm.bench.hardware.gpu import NullGpu
from minivllm.engine.options import SamplingParams
from minivllm.processes.messages import Ready
from minivllm.report.view.account import Account
from minivllm.report.view.why import parts
from minivllm.serving.app import build_app
from minivllm.serving.options import ServeOptions, is_loopback
from minivllm.serving.service import EngineService
from tests.serving.plain import call_json
from tests.serving.raw import ask
from tests.serving.running import KEY, RunningServer, line_of, serving, until_idle
from tests.serving.view.following import Follower, metric, watching

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


BODY = {"prompt": "def add(a, b):\n" * 20, "max_tokens": 600, "ignore_eos": True}


def test_what_comes_gives_the_engine_s_own_state(server: RunningServer) -> None:
    """A state that the engine tells whole is what the changes before it have led to."""
    until_idle(server)
    with watching(server) as early:
        early.until(lambda one: one.bundles)
        assert "engine" in early.bundles[0] and not early.view.requests
        asked = [
            threading.Thread(target=ask, args=(server.url, "/v1/completions", body))
            for body in (BODY, BODY | {"prompt": "x"}, BODY | {"max_tokens": 900}, BODY)
        ]
        for one in asked:
            one.start()
        early.until(lambda one: sum(r.state == "decode" for r in one.view.requests.values()) > 2)
        with watching(server) as late:
            late.until(lambda one: one.bundles)
            told_s = late.bundles[0]["time_s"]
            early.until(lambda one: one.bundles[-1]["end_s"] > told_s)
            assert late.state(told_s) == early.state(told_s)
            assert len(late.view.requests) > 2 and late.view.cached
            early.until(lambda one: len(one.bundles) > 20 and not one.view.requests)
            late.until(lambda one: not one.view.requests)
            assert late.state() == early.state()
        for one in asked:
            one.join()
    assert sum("engine" in bundle for bundle in early.bundles) == 1
    assert early.view.num_used_blocks == metric(server, "kv_cache_usage_perc") == 0
    assert sum(len(bundle.get("decoded", ())) for bundle in early.bundles) == 600 * 3 + 900 - 4
    texts = json.dumps(early.bundles)
    assert "def add" not in texts and "token_ids" not in texts
    with watching(server) as fresh:
        assert fresh.until(lambda one: one.bundles).state() == early.state()


def test_messages_come_at_most_20_times_a_second_with_gauges_once(server: RunningServer) -> None:
    with watching(server) as viewer:
        viewer.until(lambda one: one.bundles)
        begin, before = time.monotonic(), viewer.num_messages
        load = {"rate": 200, "input_len": 8, "output_len": 64}
        assert call_json(f"{server.url}/view/load", load)[0] == 200
        viewer.until(lambda one: len(one.gauges) >= 3)
        seconds = time.monotonic() - begin
        assert viewer.num_messages - before <= 20 * seconds + 3
        times = [one["time_s"] for one in viewer.gauges]
        assert all(after - before > 0.9 for before, after in pairwise(times))
        assert viewer.gauges[0]["memory_bytes"] > 50e6
        assert viewer.bundles[-1]["end_s"] == pytest.approx(times[-1], abs=30)
    until_idle(server)


def test_a_viewer_that_does_not_read_is_told_all_anew(server: RunningServer) -> None:
    behind = metric(server, "client_events_total", event="viewers_behind")
    with watching(server) as quick, watching(server, receive_buffer=4096) as slow:
        slow.until(lambda one: one.bundles)
        load = {"rate": 200, "input_len": 1, "output_len": 4}  # many changes for little work
        assert call_json(f"{server.url}/view/load", load)[0] == 200
        looked_s = [0.0]

        def is_behind(_: Follower) -> bool:
            if looked_s[0] > time.monotonic() - 0.5:
                return False
            looked_s[0] = time.monotonic()
            return metric(server, "client_events_total", event="viewers_behind") > behind

        quick.until(is_behind)
        call_json(f"{server.url}/view/load", {"rate": 0})
        slow.until(lambda one: sum("engine" in bundle for bundle in one.bundles) == 2)
        until_idle(server)
        # What both have to come to, whichever pause between two requests either has read up to.
        assert call_json(f"{server.url}/reset_prefix_cache", {})[0] == 200
        for viewer in (quick, slow):
            viewer.until(lambda one: not one.view.requests and not one.view.cached)
        assert ask(server.url, "/v1/completions", {**BODY, "max_tokens": 8})
        for viewer in (quick, slow):
            viewer.until(lambda one: not one.view.requests and one.view.cached)
        assert slow.state() == quick.state()
        assert sum("engine" in bundle for bundle in quick.bundles) == 1


def test_the_account_of_a_request_has_its_time_in_the_process_of_http(
    server: RunningServer,
) -> None:
    """Its time until its answer is written lies around the engine's."""
    with watching(server) as viewer:
        viewer.until(lambda one: one.bundles)
        answer = ask(server.url, "/v1/completions", {**BODY, "max_tokens": 8})
        request_id = answer.headers["x-engine-request-id"]
        viewer.until(
            lambda one: (
                any(times[0] == request_id and times[3] for times in one.http)
                and Account.of(one.items).lives
                and not one.view.requests
            )
        )
    ends = [one for one in viewer.http if one[0] == request_id and one[3]]
    ((_, received_s, sent_s, answered_s),) = ends
    account = Account.of(viewer.items)
    (life,) = [one for one in account.lives.values() if one.new.request_id == request_id]
    assert life.end_s is not None
    assert received_s <= sent_s <= life.new.arrival_s < life.end_s < answered_s
    assert parts(life, account)["http"] == pytest.approx(
        1e3 * (sent_s - received_s + answered_s - life.end_s), abs=0.01
    )
    assert sum(life.ms.values()) == pytest.approx(1e3 * (answered_s - received_s), abs=0.01)


def test_the_key_comes_by_header_or_by_the_first_message(guarded: RunningServer) -> None:
    with watching(guarded, authorization=f"Bearer {KEY}") as viewer:
        viewer.until(lambda one: one.bundles)
    with watching(guarded) as viewer:
        viewer.connection.send(json.dumps({"type": "auth", "api_key": KEY}))
        viewer.until(lambda one: one.bundles)
    for first in ({"type": "auth", "api_key": "wrong"}, {"type": "generate"}, None):
        with watching(guarded) as viewer, pytest.raises(ConnectionClosed) as closed:
            if first is not None:
                viewer.connection.send(json.dumps(first))
            viewer.read()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008
    with (
        pytest.raises(InvalidStatus) as refused,
        watching(guarded, authorization="Bearer no"),
    ):
        pass
    assert refused.value.response.status_code == 401


@pytest.mark.parametrize("message", ["", "[]", '{"type": "generate", "id": "1"}', b"\x00"])
def test_viewers_only_listen(server: RunningServer, message: str | bytes) -> None:
    with watching(server) as viewer:
        viewer.connection.send(json.dumps({"type": "auth", "api_key": "not needed"}))
        viewer.until(lambda one: one.bundles)
        viewer.connection.send(message)
        with pytest.raises(ConnectionClosed) as closed:
            viewer.until(lambda one: False)
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008


def test_pages_of_other_sites_cannot_watch(server: RunningServer, guarded: RunningServer) -> None:
    port = server.url.rpartition(":")[2]
    for origin, host in (
        ("http://evil.example", None),
        ("null", None),
        ("http://[", None),
        (f"http://evil.example:{port}", f"evil.example:{port}"),  # whose name leads here
    ):
        headers = {"origin": origin} | ({"host": host} if host else {})
        with pytest.raises(InvalidStatus) as refused, watching(server, **headers):
            pass
        assert refused.value.response.status_code == 403
    with watching(server, origin=server.url) as viewer:
        viewer.until(lambda one: one.bundles)
    with watching(guarded, origin="http://a.example", authorization=f"Bearer {KEY}") as viewer:
        viewer.until(lambda one: one.bundles)


def test_a_viewer_has_a_line_in_the_log(guarded: RunningServer) -> None:
    headers = {"authorization": f"Bearer {KEY}", "x-request-id": "a-viewer"}
    with watching(guarded, **headers) as viewer:
        viewer.until(lambda one: one.bundles)
    line = line_of(guarded, "a-viewer")
    assert (line["path"], line["status"], line["losses"]) == ("/ws/events", 200, 0)
    assert line["frames"] >= 1


def test_a_server_ends_while_it_is_watched_and_loaded() -> None:
    with (
        serving("task.drain_s=0.5", "batching.max_num_seqs=2") as server,
        watching(server) as quick,
        watching(server, receive_buffer=4096) as slow,
    ):
        quick.until(lambda one: one.bundles)
        slow.until(lambda one: one.bundles)
        load = {"rate": 100, "input_len": 1000, "output_len": 1000}
        assert call_json(f"{server.url}/view/load", load)[0] == 200
        quick.until(lambda one: one.view.num_waiting > 3)
        assert server.stop() == 0
        with pytest.raises(ConnectionClosed):
            quick.until(lambda one: False)
