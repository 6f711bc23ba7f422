"""Ranks that find one another, on one host and on two."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from minivllm import LLM, SamplingParams
from minivllm.errors import BadInput, Crashed
from minivllm.parallel import watch
from minivllm.parallel.place import Launch, Place
from tests.scripts.load import load_script

two_hosts = load_script("two_hosts")
KNOBS = ["quant=fp32", "runtime.threads=1", "cache.num_blocks=16"]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


def launch(monkeypatch: pytest.MonkeyPatch, **variables: str) -> Launch:
    """As torchrun says it."""
    given = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    given |= {"MASTER_PORT": "29500", "RANK": "0", "LOCAL_RANK": "0", **variables}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    return Launch()


def test_rank_0_must_be_where_other_machines_can_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match=r"rank 0 .* at localhost, which is .*--local-addr"):
        _ = launch(monkeypatch, MASTER_ADDR="localhost").address
    alone = launch(monkeypatch, MASTER_ADDR="127.0.0.1", LOCAL_WORLD_SIZE="2")
    assert alone.address == "127.0.0.1"


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [(EOFError(), False), (ConnectionResetError(), False), (TimeoutError("timed out"), True)],
)
def test_rank_0_may_end_but_the_link_to_it_may_not(error: Exception, is_lost: bool) -> None:
    class Link:
        left: list[Any] = ["call", error]

        def recv(self) -> Any:
            if isinstance(one := self.left.pop(0), Exception):
                raise one
            return one

    place = object.__new__(Place)
    place._channel = Link()  # type: ignore[assignment]
    heard = place.heard()
    assert next(heard) == "call"
    if is_lost:
        with pytest.raises(Crashed, match="the link to rank 0 is lost: timed out"):
            next(heard)
    else:
        assert not [*heard]


@pytest.fixture
def hosts() -> Iterator[Any]:
    """Two hosts, which are taken away whatever happens."""
    try:
        found = two_hosts.TwoHosts()
    except two_hosts.NotPermitted as error:
        pytest.skip(f"network namespaces are not permitted: {error}")
    yield found
    found.close()


def test_hosts_leave_nothing(hosts: Any) -> None:
    with subprocess.Popen(hosts.command(1, "sleep", "100")) as process:
        assert hosts.processes(0) == []
        while hosts.processes(1) != [process.pid]:
            assert process.poll() is None
        hosts.close()
    assert process.returncode == -9 and two_hosts.LINK not in os.listdir("/sys/class/net")


@pytest.mark.real
def test_ranks_on_two_hosts_are_one_engine_until_the_link_is_cut(
    hosts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each host starts its rank, as torchrun does there. The name of a host is no address."""
    with LLM("tiny", overrides=KNOBS) as one:
        known = one.generate([[5, 6, 7]], PARAMS)[0].outputs[0].token_ids
    monkeypatch.setattr(watch, "SILENT_S", 2.0)
    launch(monkeypatch, MASTER_ADDR=two_hosts.ADDRESSES[0])
    second = {**os.environ, "RANK": "1"}
    command = hosts.command(1, sys.executable, "-m", "minivllm")
    with subprocess.Popen(command, env=second), hosts.inside(0):
        with LLM("tiny", overrides=[*KNOBS, "parallel.tensor=2"]) as two:
            assert two.generate([[5, 6, 7]], PARAMS)[0].outputs[0].token_ids == known
            hosts.cut()
            team = two.engine.launcher.executor.team  # type: ignore[attr-defined]
            with pytest.raises(Crashed, match="rank 1 has not answered for 2 s"):
                while True:
                    team.require_all()
                    time.sleep(0.05)
            with pytest.raises(Crashed, match="rank 1 has not answered for 2 s"):
                two.generate([[5, 6, 7]], PARAMS)
        hosts.close()
