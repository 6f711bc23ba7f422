"""Several engines are driven as one: what they say comes together, and no death is overlooked."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest

from minivllm.bench import supervisor
from minivllm.bench.driver import drive
from minivllm.bench.hardware.clock import Clock
from minivllm.bench.making import WorkloadMaker
from minivllm.bench.metrics.metrics import TRANSFER, request_rows
from minivllm.bench.metrics.rows import breakdown
from minivllm.bench.records import identity, storage
from minivllm.bench.workloads.arrivals import Offline
from minivllm.bench.workloads.workload import Workload, WorkloadRequest
from minivllm.config.compose import compose
from minivllm.engine.options import SamplingParams
from minivllm.engines.base import SessionEngine
from minivllm.engines.minivllm.engine import MinivllmEngine
from minivllm.engines.replicas import replicated
from minivllm.engines.replicas.replicated import ReplicatedEngine, is_replicated
from minivllm.errors import BadInput, Crashed
from minivllm.platform.processes.channel import Channel
from minivllm.platform.processes.heartbeat import BEAT_S, SILENT_S, Beat, Silence
from minivllm.processes.placement import ALONE
from tests.engines.replicas.pretended import LIMIT, PretendedGroup
from tests.forked import fork_known
from tests.seeing import make_smolvlm

SMALL = (
    *("runtime.device=cpu", "runtime.threads=1", "cache.num_blocks=64"),
    *("measure.roofline=false", "workload.num_requests=6", "workload.output_len=8"),
)
GREEDY = SamplingParams()
PICTURES = (
    *("workload=images", "workload.num_requests=6", "workload.output_len=6"),
    *("workload.width=60", "workload.height=40", "workload.input_len=5"),
)


def workload(count: int, tokens: int = 5) -> Workload:
    return Workload(
        tuple(
            WorkloadRequest(f"r{i}", tuple(range(2, 4 + i)), tokens, ignore_eos=True)
            for i in range(count)
        )
    )


class Group:
    """A replicated engine over replicas that are threads."""

    def __init__(self, *overrides: str) -> None:
        config = compose(["runtime.device=cpu", "parallel.replicas=3", *overrides])
        self.group = PretendedGroup(config)
        self.replicas = self.group.replicas
        self.engine = ReplicatedEngine(config, group=self.group)


@pytest.fixture
def group() -> Iterator[Group]:
    group = Group()
    yield group
    group.engine.close()
    assert all(replica.stopped for replica in group.replicas) and group.group.is_closed


def test_several_engines_say_what_one_would(group: Group) -> None:
    info = group.engine.info
    assert info.max_num_seqs == 12 and info.memory == {"weights": 30, "kv_pool": None}
    assert info.warnings[:4] == ["alike", "of 0", "of 1", "of 2"]
    assert "parallel.replicas=3: 1 thread each" in info.warnings[4]
    assert {replica.config["parallel"]["replicas"] for replica in group.replicas} == {1}


def test_every_request_is_answered_once_and_counted(group: Group) -> None:
    engine = group.engine
    traces = drive(engine, workload(9), Offline(), GREEDY, Clock())
    for number, trace in enumerate(traces):
        length = number + 2
        assert trace.token_ids == [length + left for left in (5, 4, 3, 2, 1)]
        assert trace.finish_reason == "length"
    counted = engine.liveness()
    assert counted["cache"] == {"tokens": 45.0, "block_size": 4.0, "dtype": "float32"}
    assert counted["parallel"]["replicas"] == 3.0 and counted["parallel"]["threads"] == "1 | 1 | 1"
    given = [int(count) for count in str(counted["parallel"]["requests"]).split(" | ")]
    assert sum(given) == 9 and all(given)
    assert 0 < float(counted["parallel"]["driver_us"]) < 1e6
    assert [row["replica"] for row in engine.steps()] == sorted(
        range(3), key=lambda number: (group.replicas[number].engine.count, number)
    )
    assert engine.speculation() is None and engine.routing.router.queued == [0, 0, 0]


def test_a_reset_drops_what_is_under_way_and_counts_anew(group: Group) -> None:
    engine = group.engine
    for number in range(4):
        engine.submit(f"r{number}", [2, 3], SamplingParams(max_tokens=50))
    engine.poll(1.0)
    engine.reset()
    assert engine.poll(0.0) == [] and engine.routing.router.queued == [0, 0, 0]
    assert engine.liveness()["parallel"]["requests"] == "0 | 0 | 0"
    assert "driver_us" not in engine.liveness()["parallel"]
    engine.submit("r0", [2, 3], SamplingParams(max_tokens=1))  # the name is free again
    assert [output.token_ids for output in engine.poll(1.0)] == [(3,)]


def test_a_request_that_never_fits_is_refused(group: Group) -> None:
    engine, long = group.engine, list(range(LIMIT))
    with pytest.raises(BadInput, match="request long is too long"):
        engine.submit("long", long, GREEDY)
    assert engine.routing.router.queued == [0, 0, 0]
    engine.submit("r0", [2, 3], SamplingParams(max_tokens=50))
    engine.submit("later", long, SamplingParams(max_tokens=5))  # beside others nobody waits
    ended = {}
    while "later" not in ended:
        ended |= {one.request_id: one for one in engine.poll(1.0) if one.finish_reason}
    assert ended["later"].finish_reason == "refused" and "too long" in str(ended["later"].error)


def test_an_engine_that_fails_says_how(group: Group) -> None:
    with pytest.raises(MemoryError, match="no room"):  # it may be told of with the confirmation
        group.engine.submit("r0", [2, 3], SamplingParams(max_tokens=13))
        while True:
            group.engine.poll(1.0)


@pytest.mark.parametrize("moment", ["polling", "asking"])
def test_a_replica_that_falls_silent_ends_the_measurement(
    group: Group, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine does not go on. A look is 10 ms, and half a second of the clock."""
    engine, ticks = group.engine, count()
    monkeypatch.setattr(replicated, "BEAT_S", 0.01)
    engine._links[1].silence = Silence(SILENT_S, lambda: BEAT_S * next(ticks))
    engine._links[1].silence.heard()
    group.replicas[1].engine.hangs.set()
    with pytest.raises(Crashed, match=r"^replica 1 of 3 has not answered for 8 s; it ended"):
        for number in range(6):
            engine.submit(f"r{number}", [2, 3], SamplingParams(max_tokens=50))
        if moment == "asking":
            engine.liveness()
        while True:
            engine.poll(1.0)
    group.replicas[1].engine.hangs.clear()


def test_a_long_answer_of_one_replica_is_no_silence_of_another(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, ticks = group.engine, count()
    monkeypatch.setattr(replicated, "BEAT_S", 0.01)
    beats = Channel(group.replicas[1]._socket)

    def now() -> float:
        beats.send(Beat())  # another one comes before the next look
        if (tick := next(ticks)) == 40:
            group.replicas[0].engine.hangs.clear()
        return BEAT_S * tick

    group.replicas[0].engine.hangs.set()
    for number in range(3):
        engine.submit(f"r{number}", [2, 3], SamplingParams(max_tokens=50))
    engine._links[1].silence = Silence(SILENT_S, now)
    assert engine.liveness()["parallel"]["requests"] == "1 | 1 | 1"
    assert next(ticks) > 40


@pytest.mark.parametrize("moment", ["polling", "asking", "submitting"])
@pytest.mark.parametrize("victim", range(3))
def test_a_death_is_never_overlooked(group: Group, moment: str, victim: int) -> None:
    engine = group.engine
    for number in range(6):
        engine.submit(f"r{number}", [2, 3], SamplingParams(max_tokens=50))
    engine.poll(1.0)
    group.replicas[victim].die()
    with pytest.raises(Crashed, match=rf"replica {victim} of 3 ended with exit code -9"):
        if moment == "asking":
            engine.liveness()
        elif moment == "submitting":
            for number in range(6, 12):
                engine.submit(f"r{number}", [2, 3], SamplingParams(max_tokens=50))
                engine.poll(0.01)
        while True:
            engine.poll(1.0)


def test_what_another_machine_says_is_dated_by_this_ones_clock(group: Group) -> None:
    engine, far = group.engine, group.replicas[1]
    far.host, far.ahead_s, far.engine.started_s = "far", 1000.0, 5.0
    for number in range(3):
        engine.submit(f"r{number}", [2, 3], SamplingParams(max_tokens=1))
    started = {}
    while len(started) < 3:
        started |= {one.request_id: one.started_s for one in engine.poll(1.0)}
    assert sorted(started.values(), key=str) == [1005.0, None, None]
    assert {row["replica"]: row["start_s"] for row in engine.steps()} == {0: 1.0, 1: 1001.0, 2: 1.0}
    assert engine.liveness()["parallel"]["placed_at"].count("far ") == 1


def test_sessions_reach_the_router() -> None:
    group = Group("parallel.router=session")
    assert isinstance(group.engine, SessionEngine)
    requests = tuple(
        WorkloadRequest(f"r{i}", (2, 3), 5, ignore_eos=True, session=f"s{i % 2}") for i in range(8)
    )
    drive(group.engine, Workload(requests), Offline(), GREEDY, Clock())
    counted = group.engine.liveness()["parallel"]
    group.engine.close()
    assert sorted(map(int, str(counted["requests"]).split(" | "))) == [0, 4, 4]
    assert counted["session_matches"] == 6.0


def test_only_the_own_engine_has_several_processes() -> None:
    assert not is_replicated(compose([]))
    assert is_replicated(compose(["parallel.replicas=2"]))
    assert not is_replicated(compose(["parallel.replicas=2", "engine=simulated"]))


def test_processes_give_the_tokens_of_one_engine() -> None:
    config = compose([*SMALL, "parallel.replicas=2"])
    alone = MinivllmEngine({**config, "parallel": {**config["parallel"], "replicas": 1}})
    known = [trace.token_ids for trace in drive(alone, workload(5), Offline(), GREEDY, Clock())]
    alone.close()
    before = set(psutil.Process().children(recursive=True))
    engine = ReplicatedEngine(config)
    try:
        traces = drive(engine, workload(5), Offline(), GREEDY, Clock())
        assert [trace.token_ids for trace in traces] == known
        assert all(trace.started_s is not None for trace in traces)
        assert engine.text(known[0]) == alone.text(known[0])
        assert engine.liveness()["quant"]["dtype"] == "bfloat16"
        children = set(psutil.Process().children(recursive=True)) - before
        assert len(children) == 2
    finally:
        engine.close()
    assert not [child for child in children if child.is_running() and child.status() != "zombie"]


@pytest.mark.parametrize("knobs", [(), ("parallel.disaggregated=true",)], ids=["whole", "apart"])
def test_pictures_go_to_replicas_with_their_requests(
    knobs: tuple[str, ...], tmp_path: Path
) -> None:
    make_smolvlm(tmp_path)
    model = ["model=hf", f"model.path={tmp_path}", "quant=fp32", "cache.prefix_caching=true"]
    config = compose([*SMALL, *model, *PICTURES, "parallel.replicas=2", *knobs])
    alone = MinivllmEngine({**config, "parallel": {**config["parallel"], **ALONE}})
    made = WorkloadMaker().make(alone, config["workload"], 0)
    known = drive(alone, made, Offline(), GREEDY, Clock())
    counted = alone.liveness()["vision"]
    alone.close()
    engine = ReplicatedEngine(config, group=PretendedGroup(config, MinivllmEngine))
    try:
        assert WorkloadMaker().make(engine, config["workload"], 0).hash == made.hash
        traces = drive(engine, made, Offline(), GREEDY, Clock())
        assert [trace.token_ids for trace in traces] == [trace.token_ids for trace in known]
        vision = engine.liveness()["vision"]
        assert vision["images_encoded"] == counted["images_encoded"] == 6.0
        engine.reset()
    finally:
        engine.close()


def test_replicas_of_two_ranks_are_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas in threads, the second rank of each a process."""
    knobs = [*SMALL, "quant=fp32", "cache.prefix_caching=true", "cache.block_size=8"]
    alone = MinivllmEngine(compose(knobs))
    params = SamplingParams(temperature=0.8)
    known = drive(alone, workload(5), Offline(), params, Clock())
    one = alone.info.memory
    alone.close()
    fork_known(monkeypatch)
    config = compose([*knobs, "parallel.replicas=2", "parallel.tensor=2"])
    engine = ReplicatedEngine(config, group=PretendedGroup(config, MinivllmEngine))
    traces = drive(engine, workload(5), Offline(), params, Clock())
    counted, steps, info = engine.liveness(), engine.steps(), engine.info
    engine.close()
    assert [trace.token_ids for trace in traces] == [trace.token_ids for trace in known]
    for name in ("weights", "kv_pool"):  # each replica has the whole, in two parts
        assert info.memory[name] == pytest.approx(2 * (one[name] or 0), rel=0.01), name
    parallel = counted["parallel"]
    assert (parallel["replicas"], parallel["ranks"]) == (2.0, 4.0)
    assert parallel["collectives"] and parallel["collective_bytes"]
    assert {row["replica"] for row in steps} == {0, 1}
    mean = breakdown(steps)
    assert mean.collective_ms and mean.forward_ms and mean.collective_ms < mean.forward_ms
    assert "2 ranks each, of 1 thread each" in info.warnings[-1]


@pytest.mark.parametrize(
    ("kv_dtype", "handover", "ranks"),
    [
        ("auto", "memory", 1),
        ("int8", "memory", 1),
        ("auto", "file", 1),
        ("auto", "memory", 2),
        ("auto", "file", 2),
    ],
)
def test_prompts_are_handed_over_and_answers_are_those_of_one_engine(
    kv_dtype: str, handover: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas in threads, each with an engine that computes; in float32 to the token. A second
    rank of each is a process."""
    knobs = ["quant=fp32", "cache.prefix_caching=true", "cache.block_size=8"]
    overrides = [*SMALL, *knobs, f"cache.kv_dtype={kv_dtype}"]
    requests = tuple(
        WorkloadRequest(f"r{i}", tuple(range(2 + 50 * i, 4 + 59 * i)), 1 + 3 * i, ignore_eos=True)
        for i in range(5)
    )
    params = SamplingParams(temperature=0.8)
    alone = MinivllmEngine(compose(overrides))
    known = drive(alone, Workload(requests), Offline(), params, Clock())
    alone.close()
    apart = [*overrides, "parallel.replicas=3", "parallel.disaggregated=true"]
    apart += [f"parallel.tensor={ranks}"]
    fork_known(monkeypatch)
    config = compose([*apart, f"parallel.handover={handover}", f"cache.offload_dir={tmp_path}"])
    engine = ReplicatedEngine(config, group=PretendedGroup(config, MinivllmEngine))
    traces = drive(engine, Workload(requests), Offline(), params, Clock())
    counted, steps = engine.liveness(), engine.steps()
    assert not list(tmp_path.glob("*/*"))  # they are deleted as they are read
    engine.close()
    assert not list(tmp_path.iterdir())
    assert counted["parallel"]["files_handed_over"] == (4.0 if handover == "file" else 0.0)
    assert [trace.token_ids for trace in traces] == [trace.token_ids for trace in known]
    assert [trace.finish_reason for trace in traces] == ["length"] * 5
    prompts = [len(request.prompt_token_ids) for request in requests]
    assert counted["parallel"]["tokens_handed_over"] == sum(prompts[1:]) + 4
    num_bytes = float(counted["parallel"]["kv_bytes_handed_over"])
    blocks = sum(length // 8 for length in prompts[1:])
    assert num_bytes > 0 == num_bytes % blocks  # of full blocks, whose size is one
    for name in ("kv_ms_given", "kv_ms_taken"):
        assert float(counted["parallel"][name]) > 0
    rows = request_rows(traces)
    assert [rows[0][name] for name in TRANSFER] == [None] * 3  # its answer was one token
    for name in TRANSFER:
        assert sum(row[name] for row in rows[1:]) == pytest.approx(counted["parallel"][name]), name
    sizes = [length // 8 * num_bytes / blocks for length in prompts[1:]]
    assert [row["kv_bytes_handed_over"] for row in rows[1:]] == sizes
    given = str(counted["parallel"]["requests"]).split(" | ")
    assert given[0] == "5" and sum(map(int, given[1:])) == 4  # one had an answer of one token
    # What no full block of a prompt has is computed again.
    again = [1 + length % 8 for length in prompts[1:]]
    assert sum(row["num_prefill_tokens"] for row in steps) == sum(prompts) + sum(again)


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Group]:
    """Replicas that hand over through files, of which none may be left."""
    knobs = ["parallel.disaggregated=true", "parallel.handover=file", "cache.prefix_caching=true"]
    group = Group(*knobs, f"cache.offload_dir={tmp_path}")
    yield group
    group.engine.close()
    assert not list(tmp_path.iterdir())


def wait_for_file(folder: Path) -> None:
    """Until a file is whole that is handed over."""
    end = time.monotonic() + 30
    while not list(folder.glob("*/0-*")):
        assert time.monotonic() < end
        time.sleep(0.001)


def test_what_ends_before_it_is_continued_leaves_no_file(apart: Group, tmp_path: Path) -> None:
    for number in range(3):
        apart.engine.submit(f"r{number}", [2, 3], SamplingParams(max_tokens=50))
    wait_for_file(tmp_path)
    apart.engine.reset()
    assert not list(tmp_path.glob("*/*"))
    drive(apart.engine, workload(3), Offline(), GREEDY, Clock())  # the names are free again
    assert apart.engine.liveness()["parallel"]["files_handed_over"] == 3.0
    assert not list(tmp_path.glob("*/*"))


@pytest.mark.parametrize("victim", range(3))
def test_a_dead_replica_leaves_no_file(apart: Group, tmp_path: Path, victim: int) -> None:
    for number in range(4):
        apart.engine.submit(f"r{number}", [2, 3], SamplingParams(max_tokens=50))
    wait_for_file(tmp_path)
    apart.replicas[victim].die()
    with pytest.raises(Crashed, match=rf"replica {victim} of 3"):
        while True:
            apart.engine.poll(1.0)


def test_a_folder_that_disappears_ends_the_measurement_with_its_name(
    apart: Group, tmp_path: Path
) -> None:
    (folder,) = tmp_path.iterdir()
    folder.rmdir()
    with pytest.raises(BadInput, match=rf"cannot be written to {folder} \(No such file"):
        apart.engine.submit("r0", [2, 3], SamplingParams(max_tokens=50))
        while True:
            apart.engine.poll(1.0)


def test_the_record_of_a_killed_replica_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A measurement with a dead replica is not that configuration's."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    overrides = [*SMALL, "parallel.replicas=2", "workload.output_len=1500"]
    config = compose([*overrides, "cache.num_blocks=2000"])
    (measurement,) = identity.expand(config, "sweep", "arm", tmp_path, "fingerprint")
    killed: list[int] = []
    before = set(psutil.Process().children(recursive=True))

    def kill(event: dict[str, Any]) -> None:
        if event["event"] == "measuring" and event["tokens"] and not killed:
            victim = next(
                child
                for child in psutil.Process().children(recursive=True)
                if "minivllm.engines.replicas.replica" in child.cmdline()
            )
            os.kill(victim.pid, signal.SIGKILL)
            killed.append(victim.pid)

    (outcome,) = supervisor.run([measurement], kill)
    assert outcome.status == "crashed"
    record = json.loads((measurement.path / storage.RECORD).read_text())
    assert record["error"]["type"] == "Crashed"
    assert "exit code -9" in record["error"]["message"]
    assert "replica" in record["error"]["log_tail"]
    assert not (measurement.path / storage.HANDOVER).exists()
    assert set(psutil.Process().children(recursive=True)) <= before
