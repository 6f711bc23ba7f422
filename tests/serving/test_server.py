"""Starting and stopping as users do: one line, exit codes, nothing left."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from minivllm.errors import BadInput
from minivllm.serving.options import ServeOptions
from minivllm.serving.processes.token_stream import TokenStream
from minivllm.serving.server import _drain, listen
from tests.engines.servers.waiting import wait_until
from tests.forked import fork_known
from tests.later import Later
from tests.serving.raw import ask, connect, read_all, request
from tests.serving.running import ROOT, engines, serving
from tests.serving.view.following import metric, watching

openai = Later("openai")


@pytest.mark.real  # as users start it, not a fork
def test_sigterm_drains_what_runs_and_ends_with_0() -> None:
    with serving("task.drain_s=20", is_forked=False) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        chunks = client.completions.create(
            model="tiny", prompt="x", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
        )
        texts = [next(chunks).choices[0].text]
        children = psutil.Process(server.process.pid).children(recursive=True)
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        texts += [chunk.choices[0].text for chunk in chunks]
        stopping.join()
        assert len(texts) == 200 and server.process.returncode == 0
        assert not psutil.wait_procs(children, timeout=60)[1]


def test_a_small_event_does_not_wait_for_the_acknowledgement_of_another() -> None:
    """Nagle's algorithm is off on the server's connections, as asyncio sees to on TCP sockets."""

    async def nodelay() -> int:
        answered = asyncio.get_running_loop().create_future()

        class Connected(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                own = transport.get_extra_info("socket")
                answered.set_result(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
                transport.close()

        with listen(ServeOptions(port=0)) as listener:
            server = await asyncio.get_running_loop().create_server(Connected, sock=listener)
            async with server:
                _, writer = await asyncio.open_connection(*listener.getsockname()[:2])
                writer.close()
                return int(await answered)

    assert asyncio.run(nodelay())


def test_sigterm_drains_what_waits_and_refuses_what_is_new() -> None:
    """The work before it is of minutes, and over when its clients leave."""
    words = ("task.drain_s=3600", "batching.max_num_seqs=1")
    body = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True}
    with serving(*words) as server, ThreadPoolExecutor(4) as pool:
        before = [connect(server.url) for _ in range(30)]
        for one in before:
            one.sendall(request("/v1/completions", body))
        assert wait_until(lambda: metric(server, "num_requests_waiting") >= 29)
        short = body | {"max_tokens": 8}
        answers = [pool.submit(ask, server.url, "/v1/completions", short) for _ in range(4)]
        assert wait_until(lambda: metric(server, "num_requests_waiting") >= 29 + 4)
        server.process.send_signal(signal.SIGTERM)
        assert wait_until(lambda: ask(server.url, "/ready", method="GET").status == 503)
        answer = ask(server.url, "/v1/completions", short)
        assert answer.status == 503 and answer.headers["retry-after"]
        assert not any(one.done() for one in answers)
        for one in before:
            one.close()
        assert [one.result().status for one in answers] == [200] * 4
        assert server.process.wait(60) == 0


def test_a_client_that_reads_nothing_does_not_hold_up_the_end() -> None:
    body = {"prompt": "x", "max_tokens": 100, "ignore_eos": True, "logprobs": 20, "n": 8}
    with serving("task.drain_s=3600") as server, connect(server.url, receive_buffer=4096) as stuck:
        stuck.sendall(request("/v1/completions", body))
        assert wait_until(lambda: metric(server, "num_requests_running") == 8)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        answer = read_all(stuck)  # its beginning
        whole = int(answer.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        assert len(answer) < whole


def test_a_killed_engine_ends_the_server_with_1_and_a_line(tmp_path) -> None:
    log = tmp_path / "log"
    with serving(log=log) as server, watching(server) as viewer:
        viewer.until(lambda one: one.bundles)
        (engine,) = engines(server)
        engine.kill()
        assert server.process.wait(30) == 1
    assert "error: the engine has stopped" in log.read_text()


def test_what_a_drain_cuts_off_is_told_why(capsys: pytest.CaptureFixture[str]) -> None:
    async def run() -> TokenStream:
        streams: dict[str, TokenStream] = {}
        stream = TokenStream("r1", 1, 3, 9, lambda one: streams.clear())
        streams["r1"] = stream
        client = SimpleNamespace(streams=streams)
        service = SimpleNamespace(client=client, options=ServeOptions(drain_s=0))
        await _drain(cast(Any, service), asyncio.Event())
        assert not streams
        return stream

    error = asyncio.run(run()).error
    assert error is not None and error.status == 503 and error.retry_after_s
    assert capsys.readouterr().err == (
        "draining: requests that run or wait (1) go on for at most task.drain_s=0 s; a second "
        "signal ends at once\n"
    )


def test_an_address_that_is_taken_is_one_line_before_loading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fork_known(monkeypatch)
    with serving() as server:
        port = server.url.rsplit(":", 1)[1]
        second = subprocess.run(
            [sys.executable, str(ROOT / "run.py"), "preset=serve", f"task.port={port}"],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert second.returncode == 2
    assert second.stderr.startswith(f"error: task.host=127.0.0.1 task.port={port}: cannot listen")
    assert second.stderr.endswith("task.port=0 takes a free port\n")


def test_an_address_of_another_machine_is_told_so() -> None:
    with pytest.raises(BadInput, match=r"cannot listen there .*; give an address of this machine"):
        listen(ServeOptions(host="192.0.2.1", port=0))


@pytest.mark.real  # a whole server of two engines, which are killed in turn
def test_a_killed_replica_leaves_the_others_serving(tmp_path) -> None:
    log = tmp_path / "log"
    words = ("parallel.replicas=2", "parallel.router=round_robin")
    with serving(*words, log=log) as server:
        first, _ = engines(server)
        answers: list[int] = []
        fields = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 8, "ignore_eos": True}

        def complete() -> None:
            answers.append(ask(server.url, "/v1/completions", fields).status)

        first.kill()
        threads = [threading.Thread(target=complete) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert answers == [200] * 6
        assert ask(server.url, "/health", method="GET").status == 200
        assert "replica 0 of 2 has stopped" in log.read_text()
        assert wait_until(lambda: "replica 0 of 2 serves again" in log.read_text())
        ready = json.loads(ask(server.url, "/ready", method="GET").body)
        assert ready == {"status": "ready", "replicas": 2, "alive": 2}
        text = ask(server.url, "/metrics", method="GET").body.decode()
        assert re.search(r'replica_events_total\{.*event="restarted".*\} 1\.0', text)
        for one in engines(server):
            one.kill()
        assert server.process.wait(60) == 1
    assert "error: the engine has stopped" in log.read_text()
