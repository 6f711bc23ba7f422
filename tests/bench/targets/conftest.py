"""An engine for each file of tests, over a checkpoint of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minivllm.config.compose import build
from tests.reference import make_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint."""
    path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(path, "qwen3")
    return path


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest, folder: Path) -> Iterator[Any]:
    """The engine that the file's `configuration(folder)` is of."""
    config = request.module.configuration(folder)
    engine = build(config["engine"], config=config)
    yield engine
    engine.close()


@pytest.fixture
def engine(built: Any) -> Any:
    """The same with nothing in it."""
    built.reset()
    return built
