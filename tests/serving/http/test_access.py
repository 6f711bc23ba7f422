"""Who may call what, by the key, by the site, and by what the route declares."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import APIRouter
from hypothesis import given
from hypothesis import strategies as st

from minivllm import redaction
from minivllm.serving.http.access import Access, ApiKeys, OwnNames, RouteAccess, access, accesses
from minivllm.serving.options import ServeOptions
from tests.serving.raw import ask
from tests.serving.running import KEY, RunningServer

COMPLETIONS = "/v1/completions"
WITH_KEY = {"authorization": f"Bearer {KEY}"}
FOREIGN = ({"host": "evil.example:80"}, {"origin": "http://evil.example"}, {"origin": "null"})
PATHS = ("/", "/health", "/metrics", "/v1/models", "/openapi.json", "/nowhere", COMPLETIONS)


def scope(path: str, method: str = "GET", kind: str = "http") -> dict[str, Any]:
    return {"type": kind, "path": path} | ({"method": method} if kind == "http" else {})


def test_a_route_declares_its_access_beside_itself() -> None:
    routes = APIRouter()

    @routes.get("/things")
    @access(Access.OPEN | Access.QUIET)
    async def read() -> None: ...

    @routes.post("/things")
    async def write() -> None: ...

    @routes.delete("/things/{name}")
    @access(Access.COMMAND)
    async def remove(name: str) -> None: ...

    @routes.websocket("/socket")
    @access(Access.ENGINE)
    async def socket() -> None: ...

    found = RouteAccess(accesses(routes.routes))
    assert found.of(scope("/things")) == Access.OPEN | Access.QUIET
    assert found.of(scope("/things", "HEAD")) == Access.OPEN | Access.QUIET
    assert found.of(scope("/things", "POST")) == Access.DEFAULT
    assert found.of(scope("/things/one", "DELETE")) == Access.COMMAND
    assert found.of(scope("/things/one/two", "DELETE")) == Access.DEFAULT
    assert found.of(scope("/things/one", "POST")) == Access.DEFAULT
    assert found.of(scope("/socket", kind="websocket")) == Access.ENGINE
    assert found.of(scope("/nothing")) == Access.DEFAULT
    assert found.has("/things") and not found.has("/things/one") and not found.has("/nothing")


def test_a_path_with_a_secret_is_no_known_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOT_TOKEN", "marker-one")
    redaction.learn({})
    routes = APIRouter()
    for path in ("/hook", "/hook/sk-abcdefghijklmnop1", "/bot/marker-one/hook"):
        routes.get(path)(lambda: None)
    found = RouteAccess(accesses(routes.routes))
    assert found.has("/hook")
    assert not found.has("/hook/sk-abcdefghijklmnop1") and not found.has("/bot/marker-one/hook")


def test_keys_fit_whole() -> None:
    keys = ApiKeys(["one-key", "schlüssel"])
    assert keys.fit("one-key") and keys.fit("schlüssel")
    assert not any(map(keys.fit, ("", "one-ke", "one-key ", "\ud800")))
    assert not ApiKeys([])


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": KEY},
        {"authorization": f"Basic {KEY}"},
        {"x-api-key": KEY[:-1]},
    ],
)
def test_a_wrong_key_is_a_401_before_the_body_counts(
    guarded: RunningServer, headers: dict[str, str]
) -> None:
    answer = ask(guarded.url, COMPLETIONS, {"prompt": "x", "nonsense": 1}, headers)
    assert answer.status == 401 and answer.error["type"] == "authentication_error"
    assert answer.error["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"
    assert KEY not in answer.body.decode()


@pytest.mark.parametrize("headers", [WITH_KEY, {"x-api-key": KEY}])
def test_either_header_has_the_key(guarded: RunningServer, headers: dict[str, str]) -> None:
    answer = ask(guarded.url, COMPLETIONS, {"prompt": "x", "max_tokens": 1}, headers)
    assert answer.status == 200


def test_pages_of_other_origins_may_not_call(guarded: RunningServer, server: RunningServer) -> None:
    asked = {"access-control-request-method": "POST"}
    for url, origin, allowed in (
        (guarded.url, "http://a.example", "http://a.example"),
        (guarded.url, "http://b.example", None),
        (server.url, "http://a.example", None),
    ):
        headers = asked | {"origin": origin}
        answer = ask(url, COMPLETIONS, None, headers, method="OPTIONS")
        assert answer.headers.get("access-control-allow-origin") == allowed


@pytest.mark.parametrize("path", PATHS)
def test_a_foreign_name_is_refused_everywhere(server: RunningServer, path: str) -> None:
    """A page whose name was made to lead here (DNS rebinding) reads nothing."""
    body = {"prompt": "x", "max_tokens": 1} if path == COMPLETIONS else None
    for headers in (*FOREIGN, {"host": "192.0.2.1"}, {"host": "x@["}):
        answer = ask(server.url, path, body, headers, method="POST" if body else "GET")
        assert answer.status == 403 and "see task." in answer.error["message"]


def test_own_names_are_served(server: RunningServer, guarded: RunningServer) -> None:
    port = server.url.rpartition(":")[2]
    for name in ("localhost", "LOCALHOST", "127.0.0.1", "a.localhost", "[::1]"):
        headers = {"host": f"{name}:{port}", "origin": "http://localhost:3000"}
        assert ask(server.url, "/v1/models", None, headers, method="GET").status == 200
    # With keys a page needs more than a name.
    assert ask(guarded.url, "/v1/models", None, WITH_KEY | FOREIGN[0], method="GET").status == 200


@given(st.sampled_from(["gpu.example", "127.0.0.1", "10.0.0.3"]), st.booleans())
def test_names_that_the_owner_lists(name: str, is_any: bool) -> None:
    listed = ["*"] if is_any else ["GPU.example"]
    names = OwnNames(ServeOptions(host="10.0.0.3", allowed_hosts=listed), "")
    assert names.has(name) and names.has("other.example") == is_any
