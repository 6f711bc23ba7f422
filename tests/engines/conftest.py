"""An engine for each file of tests, over a checkpoint of its own; and engines in front of stand-ins
that run in threads of the test's own process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from minivllm.config.compose import build, compose
from minivllm.engines.openai import engine as openai
from minivllm.engines.servers import server
from minivllm.engines.vllm import server as vllm_server
from tests.engines.fake_server import POLL_S
from tests.engines.servers import stand_in
from tests.engines.servers.stand_in import StandIn, serve
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


class ThreadedChild:
    """In place of a process: a stand-in in a thread."""

    started: ClassVar[list[ThreadedChild]] = []

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        knob: str = "",
        listen: Callable[[str], None] | None = None,
    ) -> None:
        self.command, self.environment = list(command), dict(environment or {})
        self.stand_in = StandIn(command)
        self.server = serve(self.stand_in, listen or print)
        threading.Thread(target=self.server.serve_forever, args=(POLL_S,), daemon=True).start()
        self.process, self.stopped = self, False
        self.started.append(self)

    def poll(self) -> int | None:
        return 0 if self.stopped else None

    def exit_reason(self) -> str:
        return "is a stand-in"

    def stop(self, grace_s: float) -> None:
        self.stopped = True
        self.server.shutdown()
        self.server.server_close()


Make = Callable[..., Any]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Make]:
    """An engine of a configuration, and its stand-in as `engine.started`; all end with the test."""
    monkeypatch.setattr(openai, "Child", ThreadedChild)
    monkeypatch.setattr(openai, "LOOK_S", 0.01)
    monkeypatch.setattr(server, "require", lambda config: None)
    monkeypatch.setattr(vllm_server, "peer_packages", lambda python: {"vllm": "1"})
    for kind in ("BF16", "Q8_0"):
        (tmp_path / f"tiny-{kind}.gguf").touch()
    engines: list[Any] = []

    def build_one(name: str, *overrides: str) -> Any:
        own = {
            "llamacpp": [f"engine.gguf='{tmp_path}/tiny-{{type}}.gguf'"],
            "vllm_server": ["engine.python=python"],
            "sglang": ["engine.python=python"],
        }[name]
        config = compose([f"engine={name}", "runtime.threads=1", *own, *overrides])
        engines.append(build(config["engine"], config=config))
        engines[-1].started = ThreadedChild.started[-1]
        return engines[-1]

    yield build_one
    for engine in engines:
        engine.close()
    ThreadedChild.started.clear()


@pytest.fixture
def program(tmp_path: Path) -> str:
    """A llama-server that is a process."""
    file, root = tmp_path / "llama-server", Path(stand_in.__file__).parents[3]
    file.write_text(
        f"#!{sys.executable}\nimport runpy, sys\nsys.path.insert(0, {str(root)!r})\n"
        f"runpy.run_path({stand_in.__file__!r}, run_name='__main__')\n"
    )
    file.chmod(0o755)
    (tmp_path / "tiny-BF16.gguf").touch()
    return str(file)
