"""/v1/models."""

from __future__ import annotations

import pytest

from tests.later import Later
from tests.serving.running import RunningServer

anthropic = Later("anthropic")
openai = Later("openai")


def test_the_model_that_is_served_is_listed(server: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_anthropics_clients_read_the_same_list(server: RunningServer) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none")
    (model,) = client.models.list()
    assert (model.id, model.display_name, model.type) == ("tiny", "tiny", "model")
    assert model.created_at.tzinfo is not None
    assert client.models.retrieve("tiny") == model
