"""Cold blocks of the prefix cache in host memory and on disk: the same tokens, less computed, and
nothing left behind."""

from __future__ import annotations

import errno
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.cache.tiers.disk import DiskFile
from minivllm.cache.tiers.offload import Finished
from minivllm.engine.batching import Continuous
from minivllm.errors import BadInput
from tests.engine.test_scheduler import make
from tests.reference import make_checkpoint

# Twelve prompts of nine full blocks each; the device holds the blocks of little more than one.
PROMPTS = [[(7 * i + 3 * j + j * j) % 120 + 2 for j in range(37)] for i in range(12)]
GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)
BLOCK_GB = (
    3 * 2 * 2 * 16 * 4 * 4 / 1e9
)  # three layers, keys and values, two heads of 16, four tokens in float32
HOST = f"cache.offload_gb={1000 * BLOCK_GB:.9f}"
SMALL_HOST = f"cache.offload_gb={30.5 * BLOCK_GB:.9f}"
DISK = f"cache.offload_disk_gb={1000 * BLOCK_GB:.9f}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder)
    return folder


def make_llm(checkpoint: Path, *overrides: str, batching: str = "sequential") -> LLM:
    cache = ["cache.block_size=4", "cache.num_blocks=14", "cache.prefix_caching=true"]
    common = ["model.max_model_len=48", "runtime.device=cpu", *cache]
    return LLM(str(checkpoint), quant="fp32", batching=batching, overrides=[*common, *overrides])


def serve(llm: LLM) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("method", ["_save", "_load", "_spill"])
def test_what_a_failed_step_did_not_move_is_moved_by_the_next(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    with make_llm(checkpoint) as llm:
        expected = serve(llm)
    with make_llm(checkpoint, SMALL_HOST, DISK) as llm:
        original = getattr(llm.engine.transfers, method)

        failed = []

        def fails(*args: Any) -> None:
            if not failed:
                failed.append(True)
                raise MemoryError("once")
            original(*args)

        serve(llm)
        monkeypatch.setattr(llm.engine.transfers, method, fails)
        with pytest.raises(MemoryError):
            serve(llm)
        assert serve(llm) == expected
        assert llm.engine.cache.counters.blocks_restored


def test_a_cache_that_is_dropped_leaves_no_thread(checkpoint: Path) -> None:
    def threads() -> int:
        gc.collect()
        return sum(thread.name == "kv-offload" for thread in threading.enumerate())

    before = threads()
    llm = make_llm(checkpoint, HOST, DISK)
    assert threads() == before + 1
    del llm
    with pytest.raises(BadInput):
        make_llm(checkpoint, HOST, DISK, "attention=flash")
    assert threads() == before


def settled(llm: LLM) -> None:
    """Wait until the disk has done all it was given."""
    disk = llm.engine.transfers.disk
    assert disk is not None
    while disk._requested > disk._written:
        time.sleep(0.001)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> list[list[int]]:
    with make_llm(checkpoint, "cache.num_blocks=200") as llm:
        return serve(llm)


@pytest.mark.parametrize(
    ("overrides", "moving"),
    [
        ([], ()),
        ([HOST], ("blocks_offloaded", "blocks_restored")),
        ([SMALL_HOST], ("blocks_offloaded",)),
        (
            [SMALL_HOST, DISK],
            ("blocks_offloaded", "blocks_restored", "blocks_to_disk", "blocks_from_disk"),
        ),
    ],
    ids=["off", "host", "small_host", "disk"],
)
@pytest.mark.parametrize("batching", ["sequential", "continuous", "static"])
def test_a_working_set_larger_than_the_device_is_restored_and_not_computed(
    batching: str,
    overrides: list[str],
    moving: tuple[str, ...],
    checkpoint: Path,
    reference: list[list[int]],
) -> None:
    with make_llm(checkpoint, *overrides, batching=batching) as llm:
        assert serve(llm) == reference
        if DISK in overrides:
            settled(llm)
        before = dict(vars(llm.engine.cache.counters))
        assert serve(llm) == reference
        counters = vars(llm.engine.cache.counters)
        gained = {name: count - before[name] for name, count in counters.items()}
        tiers = ("blocks_offloaded", "blocks_restored", "blocks_to_disk", "blocks_from_disk")
        assert {name for name in tiers if counters[name]} >= set(moving)
        assert counters["disk_errors"] == 0
        if HOST in overrides:  # the second time no block of a prompt is computed again
            assert gained["prefix_tokens_reused"] == 12 * 9 * 4
        elif DISK in overrides:
            # some may leave the small host tier again before their request has room
            assert gained["prefix_tokens_reused"] >= 6 * 9 * 4
        elif batching == "sequential":
            assert gained["prefix_tokens_reused"] <= 9 * 4


def test_copies_below_are_kept_so_that_leaving_the_device_again_costs_nothing(
    checkpoint: Path,
) -> None:
    with make_llm(checkpoint, HOST) as llm:
        for _ in range(4):
            serve(llm)
        counters = llm.engine.cache.counters
        assert counters.blocks_restored > 2 * counters.blocks_offloaded


def test_logits_leave_cached_blocks_as_they_were(
    checkpoint: Path, reference: list[list[int]]
) -> None:
    with make_llm(checkpoint, HOST) as llm:
        serve(llm)
        llm.logits([5] * 48)  # takes 12 of the 14 blocks
        assert serve(llm) == reference


def test_swapped_requests_and_cold_blocks_have_slots_of_their_own(
    checkpoint: Path, reference: list[list[int]]
) -> None:
    overrides = ["batching.preemption=swap", "cache.block_size=2", "cache.num_blocks=28"]
    with make_llm(checkpoint, HOST, *overrides, batching="continuous") as llm:
        for _ in range(2):
            assert serve(llm) == reference
        assert llm.engine.cache.counters.blocks_restored > 0
        assert llm.engine.cache.swap.num_free == llm.engine.cache.layout.host_slots


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_compressed_blocks_travel_with_their_scales(kv_dtype: str, checkpoint: Path) -> None:
    overrides = [f"cache.kv_dtype={kv_dtype}", HOST, DISK]
    with make_llm(checkpoint, overrides[0], "cache.num_blocks=200") as llm:
        expected = serve(llm)
        assert llm.engine.kv.bytes_per_token * 4 * 1e-9 < BLOCK_GB
    for host in (HOST, f"cache.offload_gb={9.5 * BLOCK_GB:.9f}"):
        with make_llm(checkpoint, *overrides, host) as llm:
            for _ in range(2):
                assert serve(llm) == expected
                settled(llm)
            counters = llm.engine.cache.counters
            assert counters.blocks_restored > 0
            assert (counters.blocks_from_disk > 0) == (host != HOST)


def spoil(llm: LLM) -> None:
    """Overwrite the middle of every record."""
    disk = llm.engine.transfers.disk
    assert disk is not None
    for record in range(400):
        os.pwrite(disk._file.fileno(), b"junk", record * disk.record_bytes + 100)


def cut(llm: LLM) -> None:
    """Leave little of the file."""
    disk = llm.engine.transfers.disk
    assert disk is not None
    os.ftruncate(disk._file.fileno(), 1000)


@pytest.mark.parametrize("damage", [spoil, cut])
def test_a_damaged_file_is_noticed_and_the_tokens_are_computed(
    damage: object, checkpoint: Path, reference: list[list[int]]
) -> None:
    with make_llm(checkpoint, SMALL_HOST, DISK) as llm:
        assert serve(llm) == reference
        settled(llm)
        damage(llm)  # type: ignore[operator]
        with pytest.warns(UserWarning, match=r"offload_disk_gb: record \d+ .*checksum") as told:
            assert serve(llm) == reference
        assert len(told) == 1
        assert llm.engine.cache.counters.disk_errors > 1
        settled(llm)
        before = llm.engine.cache.counters.blocks_from_disk
        assert serve(llm) == reference  # what was computed again is written again, and good
        assert llm.engine.cache.counters.blocks_from_disk > before


class FullDisk:
    """A file that has no room for anything."""

    def __init__(self, file: object) -> None:
        self.file = file

    def __getattr__(self, name: str) -> object:
        return getattr(self.file, name)

    def write(self, content: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file of this process may grow beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_only_what_it_would_have_kept(
    checkpoint: Path, reference: list[list[int]]
) -> None:
    with make_llm(checkpoint, SMALL_HOST, DISK) as llm:
        disk = llm.engine.transfers.disk
        assert disk is not None
        file, disk._file = disk._file, FullDisk(disk._file)  # type: ignore[assignment]
        with pytest.warns(UserWarning, match="No space left on device") as told:
            for _ in range(2):
                assert serve(llm) == reference
                settled(llm)
        counters = llm.engine.cache.counters
        assert len(told) == 1 and counters.disk_errors > 1 and counters.blocks_from_disk == 0
        disk._file = file  # somebody made room
        for _ in range(2):
            assert serve(llm) == reference
            settled(llm)
        assert counters.blocks_from_disk > 0


def test_a_record_that_was_written_in_part_is_not_used(
    checkpoint: Path, reference: list[list[int]]
) -> None:
    with make_llm(checkpoint, SMALL_HOST, DISK) as llm:
        disk = llm.engine.transfers.disk
        assert disk is not None
        with (
            largest_file(20 * disk.record_bytes + 100),
            pytest.warns(UserWarning, match="File too large"),
        ):
            for _ in range(2):
                assert serve(llm) == reference
                settled(llm)
        counters = llm.engine.cache.counters
        assert counters.disk_errors > 1 and counters.blocks_from_disk > 0


def test_the_file_never_exceeds_its_bound(checkpoint: Path, reference: list[list[int]]) -> None:
    with make_llm(checkpoint, SMALL_HOST, f"cache.offload_disk_gb={20.5 * BLOCK_GB:.9f}") as llm:
        for _ in range(3):
            assert serve(llm) == reference
            settled(llm)
        disk = llm.engine.transfers.disk
        assert disk is not None
        assert os.fstat(disk._file.fileno()).st_size == 20 * disk.record_bytes


def test_a_read_that_comes_late_finds_its_block_kept_already() -> None:
    machine = make(
        Continuous(4, 64),
        blocks=4,
        block_size=1,
        prefix_caching=True,
        offload_slots=6,
        disk_records=9,
    )
    for token in (0, 1, 2):  # the blocks of 0 sink to the disk
        machine.add([token] * 4, 1)
        machine.run()
    late = machine.add([0] * 4, 1)
    machine.carry_out(machine.scheduler.plan())
    assert machine.disk.jobs and late.num_computed_tokens == 0
    machine.scheduler.finish(late, "abort")
    node = next(iter(machine.scheduler.cache.tiers.reading.values()))  # type: ignore[union-attr]
    other = machine.request([0] * 4, 1)
    other.cache.disk_ticket = 0  # does not wait
    machine.scheduler.add(other)
    machine.requests.append(other)
    machine.carry_out(machine.scheduler.plan())
    assert node.block
    for token in (3, 4):  # and it leaves the device again
        blocker = machine.request([token] * 4, 1)
        blocker.cache.disk_ticket = 0
        machine.scheduler.add(blocker)
        machine.requests.append(blocker)
        machine.carry_out(machine.scheduler.plan())
    machine.run()
    machine.check()


def test_those_running_go_on_while_a_prefix_is_read() -> None:
    machine = make(
        Continuous(4, 64),
        blocks=8,
        block_size=2,
        prefix_caching=True,
        offload_slots=4,
        disk_records=99,
    )
    for token in (0, 1, 2, 4, 5):
        machine.add([token] * 9, 1)
        machine.run()
    machine.add([3], 6)
    machine.step()
    waits = machine.add([0] * 9, 1)
    for _ in range(3):  # the disk does nothing
        plan = machine.scheduler.plan()
        assert [part.request.request_id for part in plan.scheduled] == ["5.0"]
        machine.carry_out(plan)
    machine.disk.work()
    plan = machine.scheduler.plan()
    (part,) = [part for part in plan.scheduled if part.request is waits]
    assert part.start > 0
    machine.carry_out(plan)


def test_with_nothing_else_to_do_the_next_look_at_the_disk_is_soon() -> None:
    machine = make(
        Continuous(4, 64),
        blocks=4,
        block_size=2,
        prefix_caching=True,
        offload_slots=3,
        disk_records=99,
    )
    for token in (0, 1, 2):
        machine.add([token] * 7, 1)
        machine.run()
    machine.add([0] * 7, 1)
    plan = machine.scheduler.plan()
    assert plan.transfers.reads and not plan.scheduled
    assert plan.next_poll_s is not None and plan.next_poll_s - machine.clock.time_s < 0.01


def test_records_come_back_as_they_were_and_errors_are_told(tmp_path: Path) -> None:
    disk = DiskFile(str(tmp_path), 8)
    target = torch.zeros(8, dtype=torch.uint8)
    disk.write(3, memoryview(b"abcdefgh"))
    disk.read(3, 1, memoryview(target.numpy()))
    disk.read(2, 5, memoryview(bytearray(8)))
    finished: list[Finished] = []
    while len(finished) < 3:
        finished += disk.poll()
    assert [(f.record, f.slot, f.error is None) for f in finished] == [
        (3, None, True),
        (3, 1, True),
        (2, 5, False),
    ]
    assert bytes(target.tolist()) == b"abcdefgh"
    assert list(tmp_path.iterdir()) == []
    disk.close()
    assert disk._file.closed and not disk._thread.is_alive()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cache.offload_gb=1"], "needs cache.prefix_caching=true"),
        (
            ["cache.prefix_caching=true", "cache.offload_disk_gb=1"],
            "needs cache.offload_gb above 0",
        ),
        (["cache.prefix_caching=true", "cache.offload_gb=1e-9"], "holds not one block"),
        (
            [
                "cache.prefix_caching=true",
                "cache.offload_gb=1",
                "cache.offload_disk_gb=1",
                "cache.offload_dir=/not/there",
            ],
            "cache.offload_dir=/not/there: no file can be made there",
        ),
    ],
)
def test_what_cannot_work_is_refused(overrides: list[str], message: str, checkpoint: Path) -> None:
    with pytest.raises(BadInput, match=message):
        LLM(str(checkpoint), overrides=["runtime.device=cpu", *overrides])


SERVE_FOREVER = """
import os
import sys
from pathlib import Path
from tests.cache.tiers.test_offload import DISK, SMALL_HOST, make_llm, serve

def serve_forever(folder):
    llm = make_llm(Path(sys.argv[1]), SMALL_HOST, DISK, f"cache.offload_dir={folder}")
    serve(llm)
    assert llm.engine.cache.counters.blocks_to_disk
    print(folder, os.getpid(), flush=True)
    while True:
        serve(llm)

for folder in sys.argv[2:]:
    if not os.fork():
        serve_forever(folder)
for _ in sys.argv[2:]:
    print(*os.wait(), flush=True)
"""


def test_nothing_is_left_whatever_ends_the_process(checkpoint: Path, tmp_path: Path) -> None:
    """Of three processes, which are forks of one that has imported torch."""
    ends = signal.SIGINT, signal.SIGTERM, signal.SIGKILL
    signals = {f"{tmp_path / one.name}": one for one in ends}
    for folder in signals:
        Path(folder).mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE_FOREVER, str(checkpoint), *signals],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        pids = dict(process.stdout.readline().split() for _ in signals)
        assert pids.keys() == signals.keys()
        for folder, pid in pids.items():
            os.kill(int(pid), signals[folder])
        statuses = dict(process.stdout.readline().split() for _ in signals)
        assert {*statuses} == {*pids.values()} and "0" not in statuses.values()
        assert process.wait(60) == 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert [list(Path(folder).iterdir()) for folder in signals] == [[], [], []]
