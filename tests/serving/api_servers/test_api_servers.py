"""A server whose clients are answered by several processes, as its users see it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from minivllm.engine.options import SamplingParams
from minivllm.errors import Crashed
from minivllm.serving.api_servers.api_servers import ApiServerLink, ApiServers
from minivllm.serving.api_servers.messages import NewRequests
from minivllm.serving.errors import overloaded
from tests.engines.servers.waiting import wait_until
from tests.later import Later
from tests.serving.raw import Answer, ask
from tests.serving.running import RunningServer, serving, until_idle
from tests.serving.view.following import metric, watching

openai = Later("openai")
REAL = pytest.mark.real  # a whole server of several processes
GREEDY = ("decoding=greedy", "decoding.max_tokens=null")
BODY = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("several") / "log"
    words = ("task.api_server_count=2", "task.max_num_queued_reqs=6", "batching.max_num_seqs=4")
    with serving(*GREEDY, *words, log=log) as running:
        yield running


def complete(server: RunningServer, **fields: Any) -> Answer:
    return ask(server.url, "/v1/completions", BODY | fields)


def api_servers(server: RunningServer) -> list[psutil.Process]:
    """The processes that answer clients."""
    found = []
    for child in psutil.Process(server.process.pid).children():
        if "api_server" in " ".join(child.cmdline()) or is_listening(child):
            found.append(child)
    return found


def is_listening(process: psutil.Process) -> bool:
    """Whether it has the server's socket: a fork has the command line of its template."""
    try:
        return any(one.status == psutil.CONN_LISTEN for one in process.net_connections("tcp"))
    except psutil.Error:
        return False


@REAL
def test_every_process_answers_as_one_server_does(
    several: RunningServer, server: RunningServer
) -> None:
    """The same answers, ids, models and errors, whoever takes a connection."""
    with ThreadPoolExecutor(4) as pool:
        answers = [*pool.map(lambda _: complete(several), range(12))]
    (expected,) = json.loads(complete(server).body)["choices"]
    names = set()
    for answer in answers:
        assert answer.status == 200 and json.loads(answer.body)["choices"] == [expected]
        names.add(answer.headers["x-engine-request-id"])
    assert len(names) == 12
    assert all(re.fullmatch(r"a[12]r\d+", name) for name in names)
    seen: list[str] = []
    for one in api_servers(several):
        one.suspend()  # the other one takes all that comes meanwhile
        others = {complete(several).headers["x-engine-request-id"][:2] for _ in range(2)}
        one.resume()
        assert len(others) == 1
        seen.append(*others)
    assert sorted(seen) == ["a1", "a2"]
    models = [ask(several.url, "/v1/models", method="GET").body for _ in range(8)]
    assert len(set(models)) == 1
    wrong = complete(several, prompt=[1 << 30])
    assert wrong.status == 400 and wrong.error == complete(server, prompt=[1 << 30]).error
    assert ask(several.url, "/v1/nothing", BODY).status == 404
    assert ask(several.url, "/metrics", BODY).status == 405


@REAL
def test_what_is_of_the_whole_server_is_answered_as_one(several: RunningServer) -> None:
    before = metric(several, "generation_tokens_total")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: complete(several), range(8)))
    until_idle(several)
    for _ in range(6):  # whoever is asked
        assert metric(several, "generation_tokens_total") == before + 64
        assert metric(several, "num_api_servers") == 2
    assert wait_until(lambda: metric(several, "http_responses_total", status="200") >= 8)
    assert json.loads(ask(several.url, "/ready", method="GET").body) == {"status": "ready"}
    assert ask(several.url, "/health", method="HEAD").body == b""
    assert ask(several.url, "/reset_prefix_cache", {}).status == 200
    paths = json.loads(ask(several.url, "/openapi.json", method="GET").body)["paths"]
    assert {"/v1/chat/completions", "/metrics", "/replicas", "/view/info"} <= paths.keys()


@REAL
def test_streams_and_what_ends_them(several: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{several.url}/v1", api_key="none", max_retries=0)
    chunks = client.completions.create(
        model="tiny", prompt="x", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(chunks)
    chunks.close()  # the client leaves: its request ends in the engine, too
    until_idle(several)
    stops = client.completions.create(model="tiny", prompt="def ", max_tokens=64, stop="\n", n=3)
    assert len(stops.choices) == 3 and not any("\n" in one.text for one in stops.choices)
    late = complete(several, max_tokens=2000, deadline_ms=1)
    assert late.status == 408
    until_idle(several)


@REAL
def test_one_queue_for_all(several: RunningServer) -> None:
    """Requests beyond the limit are refused, whichever process has those that wait."""
    with ThreadPoolExecutor(24) as pool:
        answers = [*pool.map(lambda _: complete(several, max_tokens=300), range(24))]
    statuses = [one.status for one in answers]
    assert set(statuses) == {200, 429} and statuses.count(200) >= 6
    refused = next(one for one in answers if one.status == 429)
    assert refused.error["code"] == "rate_limit_exceeded" and int(refused.headers["retry-after"])
    until_idle(several)
    assert metric(several, "client_events_total", event="requests_refused") == statuses.count(429)
    for one in api_servers(several):  # none of them believes that the queue is full still
        one.suspend()
        assert wait_until(lambda: complete(several).status == 200)
        one.resume()


def test_requests_of_a_call_are_refused_together() -> None:
    async def run() -> None:
        class Refusing:
            def relay(self, prompts: dict[str, list[int]], *_: Any) -> Any:
                if prompts == {"a1r9": [1]}:
                    raise ZeroDivisionError
                raise overloaded("full", 3)

        link = ApiServerLink(0, cast(Any, Refusing()), cast(Any, None), lambda link: None)
        sent: list[Any] = []
        link.send = sent.append  # type: ignore[method-assign]
        new = NewRequests({"a1r1": [1], "a1r2": [2]}, SamplingParams(), None, None, 0, False, 1, 0)
        link.take(new)
        assert [(one.request_id, one.error.status) for one in sent] == [
            ("a1r1", 429),
            ("a1r2", 429),
        ]
        link.take(new._replace(prompts={"a1r9": [1]}))  # what no client is to blame for
        assert [(one.request_id, one.error.status) for one in sent[2:]] == [("a1r9", 500)]

    asyncio.run(run())


@REAL
def test_the_live_view_sees_requests_of_all(several: RunningServer) -> None:
    with watching(several) as viewer:
        viewer.until(lambda one: one.bundles)
        with ThreadPoolExecutor(4) as pool:
            answers = [*pool.map(lambda _: complete(several), range(6))]
        names = {one.headers["x-engine-request-id"] for one in answers}
        viewer.until(lambda one: names <= {times[0] for times in one.http if times[3]})
    seen = {name: times for name, *times in viewer.http if name in names and times[2]}
    assert len(seen) == 6 and all(times == sorted(times) for times in seen.values())


@REAL
def test_one_that_dies_is_started_again(several: RunningServer) -> None:
    first, second = api_servers(several)
    first.kill()
    assert wait_until(lambda: metric(several, "client_events_total", event="api_servers_lost") == 1)
    assert complete(several).status == 200  # the other one answers
    assert wait_until(lambda: metric(several, "num_api_servers") == 2)
    second.send_signal(signal.SIGSTOP)  # one that hangs is ended, and its clients with it
    assert wait_until(lambda: metric(several, "client_events_total", event="api_servers_lost") == 2)
    assert wait_until(lambda: metric(several, "num_api_servers") == 2)
    assert not {first.pid, second.pid} & {one.pid for one in api_servers(several)}
    assert several.log is not None and "has stopped" in several.log.read_text()
    until_idle(several)


@REAL
def test_sigterm_drains_all_of_them(tmp_path: Path) -> None:
    words = ("task.api_server_count=2", "task.drain_s=20", "parallel.replicas=2")
    with serving(*GREEDY, *words) as server, ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(complete, server, max_tokens=300) for _ in range(4)]
        assert wait_until(lambda: metric(server, "num_requests_running") == 4)
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert server.stop() == 0
        assert [one.result().status for one in answers] == [200] * 4
        assert not psutil.wait_procs(children, timeout=60)[1]


@REAL
def test_a_second_signal_ends_all_of_them_at_once() -> None:
    words = ("task.api_server_count=2", "task.drain_s=600")
    with serving(*GREEDY, *words) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(complete, server, max_tokens=1500, n=4)
        assert wait_until(lambda: metric(server, "num_requests_running") == 4)
        children = psutil.Process(server.process.pid).children(recursive=True)
        server.process.send_signal(signal.SIGINT)
        assert wait_until(lambda: ask(server.url, "/ready", method="GET").status == 503)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 130
        assert not psutil.wait_procs(children, timeout=60)[1]
        answer.exception()


def test_one_that_cannot_start_is_one_line(tmp_path: Path) -> None:
    async def run() -> None:
        servers = cast(Any, object.__new__(ApiServers))
        servers.links, servers._next = [None, None], lambda: (None, None)
        link = ApiServerLink(1, cast(Any, None), cast(Any, None), lambda link: None)

        async def start(*_: Any) -> None:
            raise Crashed("its process ended while it started")

        async def exit_reason() -> str:
            return "its process ended with exit code 3"

        link.start, link.exit_reason = start, exit_reason  # type: ignore[method-assign]
        with pytest.raises(Crashed, match=r"API server 1 of 2 does not start: .* exit code 3"):
            await servers._start(link)

    asyncio.run(run())


@REAL
def test_a_dead_engine_ends_all_of_them(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving("task.api_server_count=2", log=log) as server:
        fronts = {one.pid for one in api_servers(server)}
        children = psutil.Process(server.process.pid).children()
        (engine,) = (
            one for one in children if one.pid not in fronts and os.getsid(one.pid) == one.pid
        )
        engine.kill()
        assert server.process.wait(60) == 1
        assert not psutil.wait_procs(children, timeout=60)[1]
    assert "error: the engine has stopped" in log.read_text()


def test_a_server_that_cannot_be_made_leaves_no_other_running() -> None:
    """`stop` knows each process from the moment on that it runs."""

    class Started:
        host, pid, stopped = None, 1, False

        def __init__(self) -> None:
            self.connection, self.other = socket.socketpair()

        def stop(self) -> None:
            self.stopped = True

    async def run() -> None:
        first = Started()
        processes = iter([(first, None)])

        def made() -> Any:
            try:
                return next(processes)
            except StopIteration:
                raise OSError("no more processes") from None

        servers = cast(Any, object.__new__(ApiServers))
        servers._watching = servers._restarting = ()
        servers.links = [
            ApiServerLink(n, cast(Any, None), cast(Any, None), lambda link: None) for n in range(2)
        ]
        servers._next = made
        with pytest.raises(OSError, match="no more"):
            await asyncio.gather(*map(servers._start, servers.links))
        await servers.stop()
        assert first.stopped
        first.other.close()

    asyncio.run(run())
