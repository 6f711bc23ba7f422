"""Servers for all tests of a process: of the embedded model, and of one that talks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.chat_checkpoint import make_chat_checkpoint
from tests.serving.running import KEY, RunningServer, serving


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    with serving("decoding=greedy", "decoding.max_tokens=null") as running:
        yield running


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a chat template, whose answers end by themselves."""
    return make_chat_checkpoint(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="session")
def chat_server(chat_folder: Path) -> Iterator[RunningServer]:
    """A server of that checkpoint; its model is called "talker"."""
    words = ("model=hf", f"model.path={chat_folder}", "task.served_model_name=talker")
    with serving(*words, "decoding=greedy", "decoding.max_tokens=null") as running:
        yield running


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with keys and narrow limits."""
    limits = ("max_body_mb=0.1", "max_depth=8", "client_timeout_s=1.5", "keep_alive_s=2")
    others = ("slow_reader_pieces=16", f"api_keys=[{KEY}]", "cors_origins=['http://a.example']")
    words = [f"task.{one}" for one in (*limits, *others)]
    log = tmp_path_factory.mktemp("guarded") / "log"
    with serving("decoding=greedy", "decoding.max_tokens=null", *words, log=log) as running:
        yield running
