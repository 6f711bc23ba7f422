"""A server that stays started between two measurements, and ends by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from minivllm.config.compose import build, compose
from minivllm.engines.openai import engine as openai
from minivllm.engines.servers import kept
from minivllm.errors import BadInput
from tests.engines.servers.waiting import wait_until

pytest.importorskip("aiohttp")


def test_a_server_is_found_again_and_ends_when_nobody_comes(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai, "LOOK_S", 0.01)
    monkeypatch.setattr(kept, "kept_root", lambda: tmp_path / "kept")

    def engine(*overrides: str) -> Any:
        own = (f"engine.program={program}", f"engine.gguf={tmp_path}/tiny-BF16.gguf")
        config = compose(
            ["engine=llamacpp", *own, "engine.linger_s=0.5", "runtime.threads=1", *overrides]
        )
        return build(config["engine"], config=config)

    first = engine()
    (keeper,) = first.info.processes
    server = psutil.Process(keeper).children()[0]
    used = first.liveness()["engine"]
    assert used["others_cpu"] == 0 and "idle_cpu" not in used
    assert first.liveness()["attention"]["flash_attn"] == "auto", "the log was not read"
    first.close()
    again = engine()
    assert again.info.processes == (keeper,) and again.liveness()["engine"]["idle_cpu"] >= 0
    assert any("started for an earlier measurement" in note for note in again.info.warnings)
    other = engine("cache.prefix_caching=true")
    assert other.info.processes != (keeper,), "another configuration has another server"
    other.close()
    again.close()
    assert wait_until(lambda: not server.is_running()), "the server was left behind"
    assert wait_until(
        lambda: (
            not psutil.pid_exists(keeper) or psutil.Process(keeper).status() == psutil.STATUS_ZOMBIE
        )
    )
    assert wait_until(lambda: not list((tmp_path / "kept").iterdir())), "a folder was left behind"


def test_a_server_ends_with_its_keeper(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai, "LOOK_S", 0.01)
    monkeypatch.setattr(kept, "kept_root", lambda: tmp_path / "kept")
    own = (f"engine.program={program}", f"engine.gguf={tmp_path}/tiny-BF16.gguf")
    config = compose(["engine=llamacpp", *own, "engine.linger_s=600"])
    engine = build(config["engine"], config=config)
    keeper = psutil.Process(engine.info.processes[0])
    server = keeper.children()[0]
    keeper.kill()
    assert wait_until(lambda: not server.is_running()), "the server was left behind"
    with pytest.raises(RuntimeError, match="engine=llamacpp: the server has ended"):
        engine.poll(0.01)
    engine.close()
    assert not list((tmp_path / "kept").iterdir()), "its folder was left behind"


def test_a_log_is_read_once_and_its_end_alone_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "kept_root", lambda: tmp_path)
    server, seen = kept.KeptServer("key", 1), []
    log = server.folder / kept.keeper.LOG
    log.write_bytes(b"one\n" * 3 + b"unfin")
    server.read_log(seen.append)
    with log.open("ab") as file:
        file.write(b"ished\nlast\n")
    server.read_log(seen.append)
    assert seen == ["one", "one", "one", "unfinished", "last"]
    with log.open("ab") as file:
        file.write(b"x" * kept.TAIL + b"\nend\n")
    assert server.exit_reason().endswith("| end") and " last |" not in server.exit_reason()
    server.stop(0)
    assert not server.folder.exists()


def test_folders_whose_keeper_was_killed_are_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "kept_root", lambda: tmp_path)
    left = tmp_path / "left"
    left.mkdir()
    (left / kept.keeper.LEASE).touch()
    used = kept.KeptServer("used", 1)
    other = kept.KeptServer("other", 1)
    assert not left.exists() and used.folder.exists() and other.folder.exists()
    for server in (used, other):
        server.stop(0)


@pytest.mark.parametrize("planted", ["a link", "writable by others"])
def test_a_folder_that_another_may_have_made_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    root = tmp_path / "kept"
    monkeypatch.setattr(kept, "kept_root", lambda: root)
    (tmp_path / "elsewhere").mkdir()
    if planted == "a link":
        root.symlink_to(tmp_path / "elsewhere")
    else:
        root.mkdir()
        root.chmod(0o777)
    with pytest.raises(BadInput, match="remove it"):
        kept.KeptServer("key", 1)
    assert not list((tmp_path / "elsewhere").iterdir())
