"""Ranks that die, and what is left of them."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import psutil
import pytest

from minivllm import LLM, SamplingParams
from minivllm.assembly import build_engine
from minivllm.errors import BadInput, Crashed, classify
from minivllm.parallel.team import Team
from tests.forked import ForkedPopen, fork_known, popen, template

MOST_S = 60.0  # for a death to be told; what waits without it does so for minutes
OVERRIDES = ["parallel.tensor=2", "runtime.threads=1", "cache.num_blocks=16"]
LONG = SamplingParams(max_tokens=100, ignore_eos=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where ranks keep their sockets; they are forks of a process with torch."""
    fork_known(monkeypatch)
    if popen() is ForkedPopen:
        template()  # which stays
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path


def held() -> set[object]:
    """By this process: sockets that listen, connections over TCP, and processes."""
    own = psutil.Process()
    sockets = {(one.laddr, one.raddr) for one in own.net_connections("tcp")}
    return sockets | {child.pid for child in own.children(recursive=True)}


def end_of(pid: int) -> float:
    """When a child process ends, which a busy machine may take long to start."""
    with suppress(ChildProcessError):  # somebody else has waited for it
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return time.monotonic()


def assert_nothing_is_left(team: Team, folder: Path, before: set[object]) -> None:
    team.close()
    del team
    gc.collect()
    assert not [*folder.glob("minivllm-ranks-*")]
    assert held() <= before


@pytest.mark.parametrize("tokens", [1, 2, 5])  # after a prompt's step, one of decoding, several
def test_a_killed_rank_is_told_at_once_and_nothing_of_it_is_left(
    tokens: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, team = held(), Team(2)
    monkeypatch.setattr("minivllm.llm.build_engine", partial(build_engine, team=team))
    llm = LLM("tiny", overrides=OVERRIDES)
    pieces = llm.stream([5, 6, 7], LONG)
    for _ in range(tokens):
        next(pieces)
    (pid,) = team.processes
    psutil.Process(pid).kill()
    begin = time.monotonic()
    with pytest.raises(Crashed, match="rank 1 was killed by SIGKILL") as told:
        for _ in pieces:
            pass
    assert time.monotonic() - begin < MOST_S
    assert classify(told.value) == "crashed"
    with pytest.raises(Crashed, match="SIGKILL"):
        llm.generate([[5, 6]], LONG)
    del llm, pieces, told
    assert_nothing_is_left(team, folder, before)


@pytest.mark.real
def test_a_stopped_rank_ends_the_engine_with_a_line_that_names_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, team = held(), Team(2)
    monkeypatch.setattr("minivllm.llm.build_engine", partial(build_engine, team=team))
    llm = LLM("tiny", overrides=OVERRIDES)
    pieces = llm.stream([5, 6, 7], LONG)
    next(pieces)
    (pid,) = team.processes
    psutil.Process(pid).suspend()
    with pytest.raises(Crashed, match="rank 1 has not answered for 8 s, and was ended"):
        for _ in pieces:
            pass
    del llm, pieces
    assert_nothing_is_left(team, folder, before)


def test_a_rank_that_dies_before_it_has_joined_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths: list[Future[float]] = []

    class Watched(Team):
        def __init__(self, size: int) -> None:
            super().__init__(size)
            deaths.extend(watchers.submit(end_of, pid) for pid in self.processes)

    monkeypatch.setattr("minivllm.parallel.team.MODULE", "minivllm.no_such_module")
    monkeypatch.setattr("minivllm.extras.ranked_steps.Team", Watched)
    with (
        ThreadPoolExecutor() as watchers,
        pytest.raises(Crashed, match=r"rank 1 ended with 1; .*no_such_module"),
    ):
        try:
            LLM("tiny", overrides=OVERRIDES)
        finally:
            told = time.monotonic()
    (death,) = deaths
    assert told - death.result() < MOST_S
    assert not [*folder.glob("minivllm-ranks-*")]


def test_a_rank_that_does_not_join_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minivllm.parallel.team.JOIN", timedelta(0))
    with pytest.raises(Crashed, match="rank 1 has not joined within 0 s"):
        LLM("tiny", overrides=OVERRIDES)
    assert not [*folder.glob("minivllm-ranks-*")]


def test_an_engine_that_cannot_be_built_leaves_no_rank(folder: Path) -> None:
    with pytest.raises(BadInput, match="max_model_len"):
        LLM("tiny", overrides=[*OVERRIDES, "model.max_model_len=99999"])
    assert not [*folder.glob("minivllm-ranks-*")]


def test_a_closed_engine_leaves_no_rank(folder: Path) -> None:
    with LLM("tiny", overrides=OVERRIDES) as llm:
        executor = llm.engine.launcher.executor
        (pid,) = executor.team.processes  # type: ignore[attr-defined]
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)
    assert not [*folder.glob("minivllm-ranks-*")]


def test_a_killed_rank_0_leaves_no_folder_and_no_rank(tmp_path: Path) -> None:
    """Of which it can remove nothing itself; the kill is of its whole group."""
    script = (
        "import sys; from minivllm.parallel.team import Team; team = Team(3); "
        "print(*team.processes, flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        start_new_session=True,
    )
    with process:
        assert process.stdout is not None
        ranks = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        assert len(ranks) == 2 and [*tmp_path.glob("minivllm-ranks-*/store")]
        os.killpg(process.pid, signal.SIGKILL)
    assert not psutil.wait_procs(ranks, MOST_S)[1]
    end = time.monotonic() + MOST_S
    while [*tmp_path.glob("minivllm-ranks-*")] and time.monotonic() < end:
        time.sleep(0.01)
    assert not [*tmp_path.glob("minivllm-ranks-*")]


def test_torchrun_starts_as_many_processes_as_there_are_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost"}
    for name, value in given.items():
        monkeypatch.setitem(os.environ, name, value)
    with pytest.raises(BadInput, match=r"parallel\.tensor=2: torchrun has started 3 processes"):
        LLM("tiny", overrides=OVERRIDES)


@pytest.mark.real  # a rank as torchrun starts it
def test_ranks_of_torchrun_are_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is the command line as torchrun starts it on every machine: it finds rank 0 over
    TCP."""
    knobs = ["quant=int8", "quant.dtype=float32", "speculative=ngram", "cache.prefix_caching=true"]
    knobs += ["runtime.threads=1", "cache.num_blocks=16"]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM("tiny", overrides=knobs) as one:
        known = one.generate([[5, 6, 7]], params)[0].outputs[0].token_ids
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {
        **{"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "LOCAL_RANK": "0"},
    }.items():
        monkeypatch.setenv(name, value)
    second = {**os.environ, "RANK": "1", "LOCAL_RANK": "1"}
    with subprocess.Popen([sys.executable, "-m", "minivllm"], env=second) as other:
        try:
            with LLM("tiny", overrides=[*knobs, "parallel.tensor=2"]) as two:
                assert two.generate([[5, 6, 7]], params)[0].outputs[0].token_ids == known
            assert other.wait(60) == 0
        finally:
            other.kill()
