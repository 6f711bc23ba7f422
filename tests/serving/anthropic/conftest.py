"""A client of the server that talks, by the anthropic package."""

from __future__ import annotations

import anthropic
import pytest

from tests.serving.running import RunningServer


@pytest.fixture
def client(chat_server: RunningServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=chat_server.url, api_key="none", max_retries=0)
