"""Endpoints of a user's own: the example of the docs, in a server of one and of several processes,
and what is wrong with others. What is not served is refused in the form of its API."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minivllm.config.compose import compose
from minivllm.errors import BadInput
from minivllm.serving.app import not_found
from minivllm.serving.http.access import Access, RouteAccess
from tests.later import Later
from tests.serving.plain import call_json
from tests.serving.running import KEY, RunningServer, serving
from tests.serving.view.test_routes import bare_app

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "your-own-endpoint.md"


@pytest.fixture
def mine(user_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with the files of the page."""
    for name, text in re.findall(
        r"```\w+\n# mine/(\S+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
    ):
        (user_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (user_dir / name).write_text(text)
    return user_dir


@pytest.mark.real  # servers as users start them, not forks
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_endpoint_of_the_docs_completes_a_line(mine: Path, processes: int) -> None:
    words = ("task=lines", f"task.api_server_count={processes}", "decoding=greedy")
    with serving(*words, f"--config-dir={mine / 'conf'}", is_forked=False) as running:
        body = {"model": "tiny", "prompt": "import ", "max_tokens": 16, "stop": "\n"}
        (choice,) = call_json(f"{running.url}/v1/completions", body)[1]["choices"]
        answer = call_json(f"{running.url}/line", {"begin": "import "})
        assert answer == (200, {"line": "import " + choice["text"]}) and choice["text"]
        status, error = call_json(f"{running.url}/line", {"begin": 3})
        assert status == 400 and "begin" in error["error"]["message"]
        assert call_json(f"{running.url}/line")[0] == 405
        assert call_json(f"{running.url}/v1/line")[1]["error"]["message"].endswith("mean /line?")


def test_its_knobs_are_checked_before_anything_is_loaded(
    mine: Path, cli: Callable[..., Any]
) -> None:
    node = "{_target_: my_endpoint.CompleteLine, most: 3}"
    done = cli(f"--config-dir={mine / 'conf'}", "preset=serve", f"task.endpoints=[{node}]")
    problem = "task.endpoints[0].most: my_endpoint.CompleteLine takes no such argument"
    assert done.code == 2 and problem in done.err
    with pytest.raises(BadInput, match=r"task\.endpoints=.* must be a list of"):
        compose(["preset=serve", "task.endpoints=[{max_tokens: 3}]"])


def test_what_has_no_routes_is_no_endpoint() -> None:
    with pytest.raises(BadInput, match=r"task.endpoints\[0\]: pathlib.Path is no endpoint"):
        bare_app(endpoints=[{"_target_": "pathlib.Path"}])


def test_every_route_is_for_those_it_should_be_for() -> None:
    """What is open, what commands and what goes to the engine, of all routes of the server."""
    app = bare_app(api_keys=[KEY])
    declared = {}
    for (method, path), kind in app.state.access.items():
        declared.setdefault(kind, set()).add(path)
        scope = {"type": "http", "path": path, "method": method}
        if method != "WEBSOCKET":
            assert RouteAccess(app.state.access).of(scope) == kind
    assert declared[Access.OPEN | Access.QUIET] == {"/health", "/ready"}
    assert declared[Access.OPEN] == {"/", "/view", "/view/info"}
    assert declared[Access.QUIET] == {"/metrics"}
    commands = {"/view/load", "/view/replica", "/reset_prefix_cache", "/replicas"}
    assert declared[Access.COMMAND] == commands
    apis = {"completions", "chat/completions", "responses", "messages"}
    assert declared[Access.ENGINE] == {f"/v1/{name}" for name in apis}
    assert "/v1/models" in declared[Access.DEFAULT]


openai = Later("openai")


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/v1/audio/speech", "/v1/files/x/content", "/v1/fine_tuning/jobs"]
)
def test_openais_other_apis(server: RunningServer, path: str) -> None:
    status, body = call_json(f"{server.url}{path}", {"model": "tiny", "input": "x"})
    assert status == 404
    assert body["error"]["type"] == "not_found_error"
    assert "this server generates text, and has no" in body["error"]["message"]


def test_the_openai_package_sees_why(server: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    with pytest.raises(openai.NotFoundError, match="has no embeddings"):
        client.embeddings.create(model="tiny", input="x")


def test_anthropics_batches_are_refused_in_its_form(server: RunningServer) -> None:
    for method in ("POST", "GET"):
        status, body = call_json(f"{server.url}/v1/messages/batches", method=method)
        assert status == 404 and body["type"] == "error"
        assert body["error"]["type"] == "not_found_error"
        assert "has no batches" in body["error"]["message"]


def test_an_unknown_path_is_said_to_be_absent() -> None:
    assert not_found("/v1/embeddingsx") == "there is no /v1/embeddingsx"
    assert len(not_found("/" + "x" * 9999)) < 250


def test_a_path_of_another_base_url_is_corrected(server: RunningServer) -> None:
    for path, meant in {
        "/completions": "/v1/completions",
        "/v1/v1/messages": "/v1/messages",
        "/v1/tokenize": "/tokenize",
    }.items():
        status, body = call_json(f"{server.url}{path}", {"model": "tiny"})
        assert status == 404
        assert body["error"]["message"] == f"there is no {path}; did you mean {meant}?"
    status, body = call_json(f"{server.url}/v1")
    assert (status, "/v1/models" in body["error"]["message"]) == (404, True)


def test_another_method_is_told_which_is_taken(server: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    with pytest.raises(
        openai.APIStatusError, match="/v1/completions takes POST, not GET"
    ) as raised:
        client.get("/completions", cast_to=object)
    assert raised.value.status_code == 405
    assert raised.value.response.headers["allow"] == "POST"
