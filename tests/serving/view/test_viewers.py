"""What each viewer gets, when the engine is watched, and what the server uses of its machine."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from minivllm.bench.hardware.gpu import NullGpu
from minivllm.processes.messages import ViewFrame
from minivllm.serving.errors import ApiError
from minivllm.serving.http.calls import CALL, Call
from minivllm.serving.view import viewers as module
from minivllm.serving.view.viewers import (
    MOST_CHARACTERS,
    MOST_FRAMES,
    MOST_VIEWERS,
    Gauges,
    Viewers,
)


class Room:
    """Viewers of an engine that a test speaks for."""

    def __init__(self) -> None:
        self.watched: list[bool] = []
        self.counts: Counter[str] = Counter()
        replicas = SimpleNamespace(watch=self.watched.append)
        client = SimpleNamespace(viewers=[], submitted=[], replicas=replicas)
        self.service = SimpleNamespace(
            client=client, num_viewers=0, count=lambda name: self.counts.update([name])
        )
        gauges = SimpleNamespace(read=lambda: '[{"gauges":{}}]')
        self.viewers = Viewers(cast(Any, self.service), cast(Any, gauges))

    def send(self, kind: str, *items: Any) -> None:
        for viewer in self.service.client.viewers:
            viewer(ViewFrame(json.dumps(items), kind))


async def settle() -> None:
    """Let what is due happen."""
    for _ in range(5):
        await asyncio.sleep(0)


async def at_once(read: Callable[[], str]) -> str:
    """In the place of a thread that reads gauges."""
    return read()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Coroutine[Any, Any, None]], None]:
    monkeypatch.setattr(module, "STATE_S", 0.0)
    monkeypatch.setattr(module, "GAUGES_S", 60.0)
    monkeypatch.setattr(module.asyncio, "to_thread", at_once)
    return asyncio.run


def test_a_viewer_begins_with_the_whole_state(run: Any) -> None:
    async def test() -> None:
        room = Room()
        first = room.viewers.join()
        reading = asyncio.create_task(first.next())
        await settle()
        assert room.watched == [True] and room.service.num_viewers == 1
        room.send("changes", "too early")
        room.send("restart", "all")
        assert json.loads(await reading) == ["all"]
        room.send("changes", 1, 2)
        room.send("changes", 3)
        assert [one for one in json.loads(await first.next()) if one != {"gauges": {}}] == [1, 2, 3]
        second = room.viewers.join()
        reading = asyncio.create_task(second.next())
        await settle()
        room.send("changes", 4)
        room.send("state", "all", "of it")
        assert json.loads(await reading) == ["all", "of it"]
        assert json.loads(await first.next()) == [4]
        room.viewers.leave(first)
        assert room.watched == [True, True]
        left: list[bool] = []
        room.viewers.on_empty.append(lambda: left.append(True))
        room.viewers.leave(second)
        assert room.watched == [True, True, False] and left == [True]

    run(test())


@pytest.mark.parametrize("size", [1, MOST_CHARACTERS // 2])
def test_one_that_does_not_read_loses_frames_and_begins_anew(run: Any, size: int) -> None:
    async def test() -> None:
        room = Room()
        slow, quick = room.viewers.join(), room.viewers.join()
        reading = asyncio.create_task(slow.next())
        await settle()
        room.send("restart", "all")
        await reading
        await quick.next()
        seen: list[Any] = []
        for number in range(2 * MOST_FRAMES):
            room.send("changes", number, "x" * size)
            seen += [one for one in json.loads(await quick.next()) if isinstance(one, int)]
        assert seen == list(range(2 * MOST_FRAMES)) and not quick.num_losses
        assert slow.num_losses == 1 and room.counts["viewers_behind"] == 1
        assert room.watched == [True]  # the state is not asked for before the viewer reads
        reading = asyncio.create_task(slow.next())
        await settle()
        assert room.watched == [True, True]
        room.send("state", "all again")
        room.send("changes", "after it")
        assert json.loads(await reading) == ["all again", "after it"]
        room.viewers.leave(slow)
        room.viewers.leave(quick)

    run(test())


def test_a_loss_counts_when_gauges_are_what_is_too_much(run: Any) -> None:
    async def test() -> None:
        room = Room()
        slow = room.viewers.join()
        room.send("restart", "all")
        for number in range(MOST_FRAMES - 1):
            room.send("changes", number)
        assert slow.num_losses == 0
        await settle()  # the gauges are read
        assert slow.num_losses == 1 and room.counts["viewers_behind"] == 1
        room.viewers.leave(slow)

    run(test())


def test_an_engine_that_lost_frames_tells_all_anew(run: Any) -> None:
    async def test() -> None:
        room = Room()
        viewer = room.viewers.join()
        room.send("restart", "all")
        room.send("changes", 1)
        room.send("restart", "all anew")
        assert json.loads(await viewer.next()) == ["all anew"]
        room.viewers.leave(viewer)

    run(test())


def test_there_is_room_for_so_many(run: Any) -> None:
    async def test() -> None:
        room = Room()
        inside = [room.viewers.join() for _ in range(MOST_VIEWERS)]
        with pytest.raises(ApiError, match="watch already") as error:
            room.viewers.join()
        assert error.value.status == 503 and room.counts["viewers_refused"] == 1
        room.viewers.leave(inside.pop())
        inside.append(room.viewers.join())
        for viewer in inside:
            room.viewers.leave(viewer)
        assert len(room.viewers) == 0 and room.service.num_viewers == 0

    run(test())


def test_whole_states_are_asked_for_at_most_so_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STATE_S", 3600.0)

    async def test() -> None:
        room = Room()
        viewers = [room.viewers.join() for _ in range(3)]
        tasks = [asyncio.create_task(viewer.next()) for viewer in viewers[:2]]
        await settle()
        assert room.watched == [True]
        room.send("restart", "all")
        await asyncio.gather(*tasks)
        late = room.viewers.join()
        waiting = asyncio.create_task(late.next())
        await settle()
        assert room.watched == [True]
        waiting.cancel()
        for viewer in (*viewers, late):
            room.viewers.leave(viewer)
        assert room.watched == [True, False]

    asyncio.run(test())


def test_viewers_are_told_when_a_request_of_http_came_was_sent_and_was_answered(run: Any) -> None:
    """By the call's own times; a request of the synthetic load has no call."""

    async def test() -> None:
        room = Room()
        viewer = room.viewers.join()
        room.send("restart", {"engine": {}})
        await settle()
        await viewer.next()
        call = Call("c", "host", began_s=1.0)
        (note,) = room.service.client.submitted
        stream = SimpleNamespace(request_id="r7", arrived_s=1.25)
        note(stream)
        token = CALL.set(call)
        try:
            note(stream)
        finally:
            CALL.reset(token)
        assert json.loads(await viewer.next()) == [{"http": ["r7", 1.0, 1.25, None]}]
        call.end()
        ((told, *times),) = [one["http"] for one in json.loads(await viewer.next())]
        assert (told, times[:2]) == ("r7", [1.0, 1.25]) and times[2] > 1.25
        room.viewers.leave(viewer)

    run(test())


def read(gpu: NullGpu) -> dict[str, Any]:
    own = psutil.Process()
    (item,) = json.loads(Gauges(lambda: [own.ppid()], lambda: [own.pid], gpu).read())
    return cast(dict[str, Any], item["gauges"])


def test_on_a_cpu_all_processes_count() -> None:
    gauges = read(NullGpu())
    own = psutil.Process().memory_info().rss
    parent = psutil.Process(psutil.Process().ppid()).memory_info().rss
    # this process stands for an API server, too
    assert gauges["memory_bytes"] == pytest.approx(2 * own + parent, rel=0.1)
    assert abs(gauges["time_s"] - time.monotonic()) < 60 and "watts" not in gauges


@pytest.mark.parametrize(
    ("own", "memory"), [(700, 700), (None, 900)], ids=["its own", "the whole GPU's"]
)
def test_a_gpu_tells_memory_and_power(own: int | None, memory: int) -> None:
    class OneGpu(NullGpu):
        def sample(self, pids: Any) -> dict[str, float | int | None]:
            assert pids == {psutil.Process().ppid()}
            return {"gpu_process_memory": own, "gpu_memory_used": 900, "gpu_power_w": 55.5}

    gauges = read(OneGpu())
    assert gauges["memory_bytes"] == memory and gauges["watts"] == 55.5
