"""Clients of the servers, by the openai package, and the engine by itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from minivllm import LLM
from tests.later import Later
from tests.serving.running import RunningServer

openai = Later("openai")


@pytest.fixture
def talker(chat_server: RunningServer) -> openai.OpenAI:
    """A client of the server that talks."""
    return openai.OpenAI(base_url=f"{chat_server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def talking(chat_folder: Path) -> Iterator[LLM]:
    """An engine with the same checkpoint in this process."""
    with LLM(str(chat_folder), device="cpu", overrides=["runtime.threads=1"]) as one:
        yield one
