"""A client of the server that talks, by the anthropic package."""

from __future__ import annotations

import pytest

from tests.later import Later
from tests.serving.running import RunningServer

anthropic = Later("anthropic")


@pytest.fixture
def client(chat_server: RunningServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=chat_server.url, api_key="none", max_retries=0)
