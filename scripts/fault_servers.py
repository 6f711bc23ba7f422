"""The servers that scripts/faults.py strikes: how each is started, and its processes."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil
from kill_replicas import ACTOR, COMMON, RANK, ROOT
from leftovers import family, until
from two_hosts import ADDRESSES, TwoHosts

from minivllm.platform.processes.children import module_path

START_S = 300.0
PORT = 6379  # Ray looks at other namespaces, too: one cluster of these at a time
RAY_S = 200.0  # for a node of Ray to start
TORCHRUN = "torch.distributed.run"
ENGINE = "engine_process"
APART = (
    *("parallel.replicas=4", "parallel.disaggregated=true", "parallel.prefill_replicas=2"),
    *("cache.prefix_caching=true", "parallel.handover=file"),
)
SETTINGS = (
    *("preset=serve", "task.port=0", "runtime.determinism=batch"),
    *("batching.max_num_batched_tokens=32", "parallel.router=round_robin"),
)
RANKS = ("--nproc-per-node", "1", "--master-addr", ADDRESSES[0], "--master-port", "29500")


class Sort(NamedTuple):
    """What is struck.

    Args:
        overrides: of the server.
        victim: a word of its command line.
        numbers: of the processes with that word, by age, those that may be struck.
        spare: whether others compute what it leaves.
        hosts: how many; on two the link is cut.
    """

    overrides: tuple[str, ...]
    victim: str
    numbers: slice = slice(None)
    spare: bool = True
    hosts: int = 1


TWO = "parallel.replicas=2"
SORTS = {
    "replica": Sort((TWO,), ENGINE),
    "actor": Sort((TWO, "parallel.backend=ray"), ACTOR),
    "rank": Sort((TWO, "parallel.tensor=2"), RANK),
    "lone_rank": Sort(("parallel.tensor=2",), RANK, spare=False),
    "prefill": Sort(APART, ENGINE, slice(0, 2)),
    "decode": Sort(APART, ENGINE, slice(2, 4)),
    "torchrun": Sort(("parallel.tensor=2",), "run.py", slice(1, 2), spare=False),
    "host_rank": Sort(("parallel.tensor=2",), "run.py", spare=False, hosts=2),
    "host_actor": Sort((TWO, "parallel.backend=ray"), ACTOR, hosts=2),
}


@contextlib.contextmanager
def started(name: str, hosts: TwoHosts | None, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The server of a sort, which may still load; its output goes into a log. On two hosts this
    process is on the first one, and so is the server."""
    words = [str(ROOT / "run.py"), *SETTINGS, *COMMON, *SORTS[name].overrides]
    torchrun = [sys.executable, "-m", TORCHRUN]
    commands = [[sys.executable, *words]]
    if name == "torchrun":
        commands = [[*torchrun, "--standalone", "--nproc-per-node", "2", *words]]
    with contextlib.ExitStack() as stack:
        variables = {**os.environ, "PYTHONPATH": module_path(), "HF_HUB_OFFLINE": "1"}
        if hosts is not None and name == "host_rank":
            two = [[*torchrun, "--nnodes", "2", "--node-rank", str(n), *RANKS] for n in (0, 1)]
            commands = [[*two[0], *words], hosts.command(1, *two[1], *words)]
        elif hosts is not None:
            variables |= stack.enter_context(ray_cluster(hosts, variables, log))
        out = stack.enter_context(log.open("ab"))
        running = [subprocess.Popen(c, stdout=out, stderr=out, env=variables) for c in commands]
        try:
            yield running[0]
        finally:
            for one in running:
                one.terminate()
            for one in running:
                try:
                    one.wait(30)
                except subprocess.TimeoutExpired:
                    one.kill()
                    one.wait()


@contextlib.contextmanager
def ray_cluster(hosts: TwoHosts, variables: dict[str, str], log: Path) -> Iterator[dict[str, str]]:
    """A cluster of a node for each host, one CPU each; gives the variables that name it."""
    program = Path(sys.executable).with_name("ray")
    named = {
        **{"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64},
        **{"RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": f"{ADDRESSES[0]}:{PORT}"},
    }
    heads = (
        ("--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={log.parent}"),
        (f"--address={ADDRESSES[0]}:{PORT}",),
    )
    nodes = []
    with log.open("ab") as out:
        for number, words in enumerate(heads):
            own = (f"--node-ip-address={ADDRESSES[number]}", "--num-cpus=1", "--block")
            small = "--object-store-memory=80000000"
            command = hosts.command(number, str(program), "start", *words, *own, small)
            given = {**variables, **named}
            del given["RAY_ADDRESS"]
            nodes.append(subprocess.Popen(command, stdout=out, stderr=out, env=given))
            until(partial(_has_started, log, number + 1), RAY_S, "Ray does not start")
    try:
        yield named
    finally:
        for one in reversed(nodes):
            one.terminate()
        for one in nodes:
            one.wait(60)
        for pid in (*hosts.processes(0), *hosts.processes(1)):
            with contextlib.suppress(psutil.Error):
                if "Agent" in " ".join((one := psutil.Process(pid)).cmdline()):
                    one.kill()  # Ray's own, which outlive their nodes for a while


def _has_started(log: Path, count: int) -> bool:
    return log.read_bytes().count(b"Ray runtime started") >= count


def reported_port(log: Path) -> int | None:
    """The port of a server that serves."""
    found = re.search(r"serving \S+ at http://[^/]*:(\d+)", log.read_text(errors="replace"))
    return None if found is None else int(found[1])


def port_of(process: subprocess.Popen[bytes], log: Path) -> int:
    """The port of a server, once it serves."""
    until(lambda: reported_port(log) or process.poll() is not None, START_S, "it does not start")
    port = reported_port(log)
    assert port, f"the server has ended: {log.read_text(errors='replace')[-2000:]}"
    return port


def victims(sort: Sort, server: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The processes that may be struck, by age."""
    if sort.victim == ENGINE:  # they lead sessions, as what removes temporary folders does
        found = psutil.Process(server.pid).children()
        found = [one for one in found if os.getsid(one.pid) == one.pid]
        return [one for one in found if "-I" not in one.cmdline()][sort.numbers]
    found = [one for one in family(sort.victim) if one.pid != server.pid]
    return [one for one in found if TORCHRUN not in one.cmdline()][sort.numbers]
