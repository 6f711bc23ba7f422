"""What is not served is refused in the form of the API that was called."""

from __future__ import annotations

import pytest

from minivllm.serving.refusals import not_found
from tests.later import Later
from tests.serving.plain import call_json
from tests.serving.running import RunningServer

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
