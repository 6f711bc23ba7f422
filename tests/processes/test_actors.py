"""Replicas as actors: with a stand-in for Ray, and where Ray is installed on a cluster of it."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from minivllm.bench.driver import drive
from minivllm.bench.hardware.clock import Clock
from minivllm.bench.workloads.arrivals import Offline
from minivllm.bench.workloads.workload import Workload, WorkloadRequest
from minivllm.config.compose import compose
from minivllm.engine.options import SamplingParams
from minivllm.engines.minivllm.engine import MinivllmEngine
from minivllm.engines.replicas.replicated import ReplicatedEngine
from minivllm.errors import BadInput, Crashed, NotInstalled
from minivllm.platform.processes.channel import Channel
from minivllm.processes import actors, ray_cluster
from minivllm.processes.actors import RayActors
from minivllm.processes.group import EngineGroup
from minivllm.processes.ray_cluster import require_ray
from tests.engines.replicas.pretended import PretendedGroup
from tests.processes.pretended_ray import PretendedRay

ECHO = "tests.processes.pretended_ray.echo"
RUNTIME = {"device": "cpu", "threads": 1, "cores": None}
NO_GPUS: list[int] = []


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PretendedRay:
    pretended = PretendedRay()
    monkeypatch.setitem(sys.modules, "ray", pretended)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_cluster, "_require_answer", lambda address: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ray_cluster.QUIET:
        monkeypatch.setenv(name, "0")
    return pretended


def start(count: int = 2, target: str = ECHO, **runtime: Any) -> RayActors:
    parallel = {"replicas": count, "tensor": 1}
    return RayActors(target, parallel, {**RUNTIME, **runtime}, lambda: NO_GPUS)


def test_actors_are_spoken_to_and_their_death_is_told_with_their_words(
    ray: PretendedRay, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    group = start()
    first, second = group.start(0), group.start(1)
    channels = [Channel(one.connection) for one in (first, second)]
    for number, channel in enumerate(channels):
        channel.send(f"hello {number}")
    assert [channel.receive(None) for channel in channels] == [["hello 0"], ["hello 1"]]
    assert first.host is None and not first.ahead_s
    os.kill(first.pid, signal.SIGKILL)
    while not channels[0].closed:
        channels[0].receive(None)
    assert first.exit_reason() == (
        f"has died: it was killed. (Ray actor of process {first.pid}); it printed last: hello 0"
    )
    group.request(0)  # in the place of the first
    again = group.start(0)
    anew = Channel(again.connection)
    anew.send("hello again")
    assert anew.receive(None) == ["hello again"] and again.pid != first.pid
    psutil.Process(again.pid).suspend()
    again.kill()
    assert not psutil.pid_exists(again.pid)
    channels[1].close()
    assert second.exit_reason().startswith("ended with exit code 3")
    for one in (first, second, again):
        one.stop()
    (folder,) = tmp_path.glob("ray-*")
    group.close()
    assert not ray.is_initialized() and not folder.exists()
    assert signal.getsignal(signal.SIGTERM) is before
    assert not psutil.pid_exists(second.pid)
    assert "hello 1" in capfd.readouterr().err


def test_without_an_address_a_small_cluster_of_this_machine_is_started(ray: PretendedRay) -> None:
    ray.starts = False
    group = start(4)
    (init,) = ray.inits
    assert (init["address"], init["num_cpus"], init["include_dashboard"]) == ("local", 4, False)
    assert init["object_store_memory"] == 100_000_000 and not init["log_to_driver"]
    assert [one["num_cpus"] for one in ray.reserved] == [1] * 4
    assert {one["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] for one in ray.reserved} == {"1"}
    assert [place["threads"] for place in group.places] == [1] * 4
    group.close()
    assert not ray.is_initialized()


def test_an_existing_cluster_is_used_and_left_as_it_is(
    ray: PretendedRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "far:6379")
    ray.starts = False
    group = start(3, threads=2)
    assert ray.inits[0]["address"] == "far:6379" and "num_cpus" not in ray.inits[0]
    assert [one["num_cpus"] for one in ray.reserved] == [2] * 3
    assert group.places == [{**RUNTIME, "threads": 2}] * 3
    group.close()
    ray.init()  # somebody's own connection stays
    group = start(1)
    group.close()
    assert len(ray.inits) == 2 and ray.is_initialized()


@pytest.mark.parametrize(
    ("resources", "knobs", "said"),
    [
        ((1.0, 0.0), {}, "the replicas need 2 CPUs, and the cluster has 1"),
        ((8.0, 1.0), {"device": "cuda"}, "the replicas need 2 GPUs, and the cluster has 1"),
        (
            (8.0, 1.0),
            {"device": "auto"},
            "runtime.device=auto: the cluster of RAY_ADDRESS has GPUs",
        ),
        ((8.0, 0.0), {"cores": "0-1"}, "runtime.cores=0-1: .* leave it out"),
        ((8.0, 2.0), {"device": "cuda:0-1"}, "runtime.device=cuda:0-1: .* use runtime.device=cuda"),
    ],
    ids=["cpus", "gpus", "auto", "cores", "device"],
)
def test_what_a_cluster_cannot_do_is_told_at_once(
    ray: PretendedRay,
    monkeypatch: pytest.MonkeyPatch,
    resources: tuple[float, float],
    knobs: dict[str, Any],
    said: str,
) -> None:
    small = PretendedRay(*resources)
    monkeypatch.setitem(sys.modules, "ray", small)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(BadInput, match=said):
        start(**knobs)
    assert not small.is_initialized() and not small.reserved


def test_a_cluster_that_is_not_there_or_starts_nothing(
    ray: PretendedRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "far:6379")
    ray.refuses = True
    with pytest.raises(BadInput, match=r"RAY_ADDRESS=far:6379 is no cluster .*nobody listens"):
        start()
    monkeypatch.delenv("RAY_ADDRESS")
    with pytest.raises(BadInput, match="no cluster can be started on this machine"):
        start()
    ray.refuses = ray.starts = False
    monkeypatch.setattr(actors, "START_S", 0.0)
    monkeypatch.setattr(actors, "POLL_S", 0.01)
    group = start()
    with pytest.raises(BadInput, match=r"not started a replica .* are free: 8 CPUs, 0 GPUs"):
        group.start(0)
    group.close()


def test_what_a_cluster_says_is_one_line() -> None:
    traced = "No GCS. Last error: Traceback (most recent call last):\n  File a\nAuth: no token\n"
    assert ray_cluster._last_line(ConnectionError(traced)) == "Auth: no token"
    assert ray_cluster._last_line(ConnectionError("nobody listens\nhere")) == "nobody listens"


def test_an_actor_that_ends_before_it_connects(ray: PretendedRay) -> None:
    group = start(1, target="tests.processes.pretended_ray.nonesuch")
    ray.kill(group._expected[0].handle)
    with pytest.raises(RuntimeError, match="cannot start in its Ray actor: it was killed"):
        group.start(0)
    assert not group._expected, "a later one would be taken for it"
    group.close()


def test_one_that_waits_for_room_holds_up_no_other(ray: PretendedRay) -> None:
    ray.starts = False  # the cluster is full
    group = start(2)
    assert group.poll(0) is None
    ray.starts = True  # a place is free, and Ray gives it to one of them
    group.request(1)
    second = group.start(1)
    assert group.poll(0) is None
    group.request(0)
    first = group.start(0)
    assert first.pid != second.pid
    for one in (first, second):
        one.connection.close()
        one.stop()
    group.close()
    with pytest.raises(Crashed, match="not used any more"):
        group.start(0)


def test_a_stranger_is_not_heard(ray: PretendedRay, monkeypatch: pytest.MonkeyPatch) -> None:
    ray.starts = False
    group = start(1)
    token = group._expected[0].token
    address = group._listener.getsockname()
    stranger = socket.create_connection(address)
    stranger.sendall(b"x" * (actors.TOKEN + actors.GREETING))
    ours = [actors._connect(address, token, purpose) for purpose in ("calls", "output")]
    actor = group.start(0)
    assert actor.connection.getpeername() == ours[0].getsockname()
    assert stranger.recv(1) == b"" and ours[0].recv(1) == b"."
    for one in (stranger, *ours, actor.connection):
        one.close()
    group.close()


def test_a_look_refuses_one_stranger(ray: PretendedRay) -> None:
    ray.starts = False
    group = start(1)
    address = group._listener.getsockname()
    strangers = [socket.create_connection(address) for _ in range(2)]
    for one in strangers:
        one.sendall(b"x" * (actors.TOKEN + actors.GREETING))
    assert group.poll(0) is None
    assert strangers[0].recv(1) == b""
    strangers[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        strangers[1].recv(1)
    for one in strangers:
        one.close()
    group.close()


def test_one_who_speaks_slowly_has_one_time_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))  # a second a byte
    monkeypatch.setattr(actors.time, "monotonic", lambda: float(next(now)))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for size in (4, 5):
            theirs.sendall(b"x" * 4)
            if size == 4:
                assert actors._exactly(ours, size, 50.0) == b"xxxx"
            else:
                with pytest.raises(TimeoutError):
                    actors._exactly(ours, size, 1.0)


def test_the_clock_of_another_machine_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class FarClock:
        """A socket whose other end has a clock of its own."""

        def sendall(self, data: bytes) -> None:
            self.answer = actors.CLOCK.pack(time.monotonic() - 1000.0)

        def recv(self, size: int) -> bytes:
            return self.answer[:size]

    far: Any = FarClock()
    assert actors._offset(far) == pytest.approx(1000.0, abs=1.0)


def test_ray_that_is_not_installed_is_one_line(
    ray: PretendedRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(NotInstalled, match=r"parallel.backend=ray needs Ray .*'\.\[ray\]'"):
        start()
    monkeypatch.setattr(ray_cluster, "find_spec", lambda name: None)
    with pytest.raises(NotInstalled, match="which is not installed: pip install"):
        require_ray({"backend": "ray", "replicas": 2})
    require_ray({"backend": "ray", "replicas": 1})  # of a sweep over replicas
    require_ray({"backend": "processes", "replicas": 2})


@pytest.fixture(scope="module")
def temporary() -> Iterator[str]:
    """A short path: Ray puts sockets there, whose names may not be long."""
    with tempfile.TemporaryDirectory(prefix="r") as folder:
        yield folder


@pytest.mark.real
def test_actors_of_a_real_cluster_leave_what_processes_leave(
    temporary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", temporary)
    small = (
        "runtime.device=cpu",
        "runtime.threads=1",
        "cache.num_blocks=64",
        "parallel.replicas=2",
    )
    requests = tuple(
        WorkloadRequest(f"r{i}", tuple(range(2, 4 + i)), 5, ignore_eos=True) for i in range(4)
    )

    def served(group: EngineGroup | None, *knobs: str) -> tuple[ReplicatedEngine, Sequence[Any]]:
        engine = ReplicatedEngine(compose([*small, *knobs]), group=group)
        traces = drive(engine, Workload(requests), Offline(), SamplingParams(), Clock())
        return engine, [(trace.token_ids, trace.started_s is not None) for trace in traces]

    one, known = served(PretendedGroup(compose([*small]), MinivllmEngine))
    fields = {group: sorted(names) for group, names in one.liveness().items()}
    steps = [sorted(row) for row in one.steps()]
    one.close()
    before = set(psutil.Process().children(recursive=True))
    engine, found = served(None, "parallel.backend=ray")
    try:
        assert found == known
        counted = engine.liveness()
        assert {group: sorted(names) for group, names in counted.items()} == fields
        assert counted["parallel"]["requests"] == "2 | 2"
        assert sorted(engine.steps()[0]) == steps[0]
        os.kill(engine.info.processes[1], signal.SIGKILL)
        with pytest.raises(Crashed, match=r"replica 1 of 2 has died: .* \(Ray actor of process"):
            while True:
                engine.poll(1.0)
    finally:
        engine.close()
    left = set(psutil.Process().children(recursive=True)) - before
    assert not [one for one in left if one.status() != psutil.STATUS_ZOMBIE]
    assert not list(Path(temporary).glob("ray-*"))
