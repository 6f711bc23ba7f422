"""Health, readiness, version, and the prefix cache."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from minivllm import __version__
from minivllm.serving.control import ReplicasBody, router
from minivllm.serving.errors import ApiError
from minivllm.serving.options import ServeOptions
from tests.later import Later
from tests.serving.plain import call, call_json
from tests.serving.raw import ask
from tests.serving.running import RunningServer

openai = Later("openai")


def test_a_server_that_serves(server: RunningServer) -> None:
    assert call_json(f"{server.url}/health") == (200, {"status": "ok"})
    assert call_json(f"{server.url}/ready") == (200, {"status": "ready"})
    assert call_json(f"{server.url}/version") == (200, {"version": __version__})


@pytest.mark.parametrize(
    ("alive", "draining", "health", "ready"),
    [(True, False, 200, 200), (True, True, 200, 503), (False, False, 503, 503)],
)
def test_what_a_load_balancer_is_told(alive: bool, draining: bool, health: int, ready: int) -> None:
    replicas = SimpleNamespace(links=[0] * 3, wanted=[0] * 3, serving=[0] * 2)
    client = SimpleNamespace(is_alive=alive, replicas=replicas)
    service = SimpleNamespace(client=client, is_draining=draining)
    paths = {route.path: route.endpoint for route in cast(Any, router(cast(Any, service))).routes}
    for path, expected in (("/health", health), ("/ready", ready)):
        try:
            asyncio.run(paths[path]())
            status = 200
        except ApiError as error:
            status = error.status
        assert status == expected


def test_the_prefix_cache_is_emptied_while_nothing_runs(server: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    def cached() -> int:
        usage = client.completions.create(
            model="tiny", prompt="import sys\n" * 60, max_tokens=1
        ).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    url = f"{server.url}/reset_prefix_cache"
    cached()
    assert cached() > 0
    assert call_json(url, method="POST") == (200, {"reset": True})
    assert cached() == 0
    chunks = client.completions.create(
        model="tiny", prompt="x", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    )
    next(chunks)
    status, body = call_json(url, method="POST")
    chunks.close()
    assert status == 409 and "requests are running" in body["error"]["message"]
    assert call(url)[0] == 405


def test_the_number_of_replicas_is_for_who_has_the_key(
    server: RunningServer, guarded: RunningServer
) -> None:
    assert ask(guarded.url, "/replicas", {"replicas": 1}).status == 401
    assert ask(guarded.url, "/replicas", None, method="GET").status == 401
    foreign = {"origin": "http://evil.example"}
    assert ask(server.url, "/replicas", {"replicas": 2}, foreign).status == 403
    refused = ask(server.url, "/replicas", {"replicas": 2})
    assert refused.status == 400 and "start it with parallel.replicas=2" in refused.error["message"]
    alone = {"replicas": 1, "serving": 1, "starting": 0, "draining": 0, "stopped": 0}
    assert call_json(f"{server.url}/replicas") == (200, alone)


@pytest.mark.parametrize(
    ("alive", "draining", "record", "host", "status"),
    [
        (True, False, False, "127.0.0.1", 202),
        (True, False, False, "0.0.0.0", 403),
        (True, True, False, "127.0.0.1", 503),
        (True, False, True, "127.0.0.1", 409),
        (False, False, False, "127.0.0.1", 503),
    ],
)
def test_when_the_number_of_replicas_can_be_changed(
    alive: bool, draining: bool, record: bool, host: str, status: int
) -> None:
    asked: list[tuple[int, float]] = []
    replicas = SimpleNamespace(states=lambda: {"replicas": 3})
    client = SimpleNamespace(
        is_alive=alive, replicas=replicas, resize=lambda *given: asked.append(given)
    )
    options = ServeOptions(record=record, drain_s=7.0, host=host)
    service = SimpleNamespace(client=client, is_draining=draining, options=options)
    routes = cast(Any, router(cast(Any, service))).routes
    (post,) = [one for one in routes if one.path == "/replicas" and "POST" in one.methods]
    try:
        assert asyncio.run(post.endpoint(ReplicasBody(replicas=3))) == {"replicas": 3}
        found = post.status_code
    except ApiError as error:
        found = error.status
    assert found == status and asked == [(3, 7.0)] * (status == 202)
