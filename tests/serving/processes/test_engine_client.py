"""What a client of the engine makes of its pieces, and of its replicas, without an engine."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from minivllm.engine.options import SamplingParams
from minivllm.models.vision.inputs import ImageSpan, ProcessedImage, RequestInputs
from minivllm.platform.processes.channel import Frames
from minivllm.platform.processes.heartbeat import BEAT_S, SILENT_S, Beat, Silence
from minivllm.processes.link import EngineLink
from minivllm.processes.messages import (
    Abort,
    EngineState,
    Failed,
    Piece,
    Prefix,
    Ready,
    Reset,
    ResetPrefixCache,
    Step,
    Submit,
    Watch,
)
from minivllm.processes.router import RoutedRequest, Router
from minivllm.serving.errors import ApiError
from minivllm.serving.processes.engine_client import EngineClient
from minivllm.serving.processes.token_stream import TokenStream

READY = Ready(9, 9, (), 4, 9, 4, SamplingParams(), ["a warning"])
STATE = EngineState(1, 2, 3, {"steps": 5.0})


class Transport:
    """Keeps what is sent to the engine."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def write(self, data: bytes) -> None:
        self.sent += Frames().push(data)

    def close(self) -> None:
        pass

    def abort(self) -> None:
        asyncio.get_running_loop().call_soon(self.lost)

    def lost(self) -> None:
        raise NotImplementedError


class NoFleet:
    """Stands in for a Fleet; starts a replica again where `works`, with nobody behind it."""

    works, num_restarts = False, 0

    async def revive(self, link: EngineLink, left: int) -> bool:
        if self.works:
            link.is_alive = True
            self.num_restarts += 1
        return self.works

    def close(self) -> None:
        pass


def piece(completion: int, token_id: int | None, reason: str | None, error: str | None) -> Piece:
    return Piece("r1", completion, token_id, 1, "a", reason, None, None, 0, None, error)


@pytest.mark.parametrize(
    ("last", "status"),
    [
        (piece(1, None, "error", "no finite logits"), 500),
        (piece(1, None, "error", "the grammar cannot go on")._replace(bad_input=True), 400),
        (piece(1, None, "shed", None), 408),
    ],
)
def test_a_completion_that_fails_ends_its_request_in_the_engine(last: Piece, status: int) -> None:
    async def run() -> tuple[TokenStream, list[Any], list[Piece], ApiError]:
        client, transport = EngineClient({}, 9), Transport()
        link = client.replicas.links[0]
        link._transport = cast(Any, transport)
        link.receive(READY)
        client.begin([READY])
        stream = client.submit([1], SamplingParams(n=2))
        state = EngineState(0, 0, 0, None)
        link.receive(Step(1.0, [piece(0, 5, None, None), last], state, []))
        link.receive(Step(2.0, [piece(0, 6, "length", None)], state, []))
        assert not client.streams
        got: list[Piece] = []
        with pytest.raises(ApiError) as error:
            async for pieces in stream.batches():
                got += pieces
        return stream, transport.sent, got, error.value

    stream, sent, got, error = asyncio.run(run())
    assert sent[1:] == [Abort("r1")]
    assert [one.token_id for one in got] == [5]  # those before stay
    assert error.status == status and stream.finish_reason == last.finish_reason


class Replicas:
    """A client with replicas that nobody has started; each keeps what it is sent."""

    def __init__(
        self,
        count: int,
        router: str = "round_robin",
        folder: str | None = None,
        **parallel: Any,
    ) -> None:
        parallel |= {"replicas": count, "router": router}
        config = {"parallel": parallel, "cache": {"prefix_caching": True, "offload_dir": folder}}
        self.client = EngineClient(config, 9)
        self.fleet = NoFleet()
        self.client._fleet = self.client._resizing._fleet = cast(Any, self.fleet)
        self.sent = []
        for link in self.client.replicas.links:
            transport = Transport()
            link._transport = cast(Any, transport)
            transport.lost = link.lose  # type: ignore[method-assign]
            link.receive(READY)
            self.sent.append(transport.sent)
        self.client.begin([READY] * count)

    def answer(self, number: int, request_id: str, reason: str | None = None) -> None:
        one = piece(0, 5, reason, None)._replace(request_id=request_id)
        self.client.replicas.links[number].receive(Step(1.0, [one], STATE, []))

    def die(self, number: int) -> None:
        self.client.replicas.links[number].lose()


def test_an_end_that_was_asked_for_is_no_loss() -> None:
    async def run() -> None:
        client = Replicas(3).client
        for link in client.replicas.links:
            transport = cast(Any, link._transport)
            transport.close = partial(asyncio.get_running_loop().call_soon, link.lose)
        client.replicas.links[0].lose()
        await asyncio.gather(*client._resizing.tasks)
        await client.stop()
        await asyncio.sleep(0.01)
        assert not client._resizing.tasks and client.replica_events["lost"] == 1

    asyncio.run(run())


def test_several_replicas_are_one_engine() -> None:
    async def run() -> None:
        replicas = Replicas(3)
        client = replicas.client
        assert client.replicas.info == READY._replace(max_num_seqs=12, num_blocks=27)
        names = [client.submit([1], SamplingParams()).request_id for _ in range(4)]
        assert [len(sent) for sent in replicas.sent] == [2, 1, 1]
        for number, name in enumerate(names):
            replicas.answer(number % 3, name, "length")
        assert not client.streams and client.routing.router.queued == [0, 0, 0]
        engines = client.replicas
        assert engines.state == EngineState(3, 6, 9, None) and engines.counters == {"steps": 15.0}
        replicas.die(1)
        assert engines.state.num_running == 2 and engines.counters == {"steps": 15.0}

    asyncio.run(run())


def test_pictures_are_routed_by_their_digests() -> None:
    async def run() -> None:
        replicas = Replicas(2, "prefix_aware")
        for number in (0, 1, 2, 3, 0):
            image = ProcessedImage(b"%d" % number, np.zeros((1, 1), np.uint8), 8)
            inputs = RequestInputs((image,), (ImageSpan(0, 8, 0),))
            stream = replicas.client.submit([49] * 9, SamplingParams(), None, inputs)
            replicas.client._abort(stream)
        assert replicas.client.routing.router.given == [3, 2]
        assert replicas.client.routing.router.counters["prefix_tokens_matched"] == 8

    asyncio.run(run())


class Nowhere(Router):
    """A router of a user's own that chooses nothing, once a replica is dead."""

    def choose(self, request: RoutedRequest, alive: Any) -> int:
        return alive[0] if len(alive) == 2 else None  # type: ignore[return-value]


def test_a_router_that_fails_is_an_error_of_the_request() -> None:
    async def run() -> None:
        replicas = Replicas(2, cast(Any, {"_target_": f"{__name__}.Nowhere"}))
        stream = replicas.client.submit([1], SamplingParams())
        replicas.die(0)
        assert stream.error is not None and stream.error.status == 500
        with pytest.raises(ApiError, match="Nowhere returned None") as refused:
            replicas.client.submit([1], SamplingParams())
        assert refused.value.status == 500 and not replicas.client.streams

    asyncio.run(run())


def test_requests_without_a_seed_draw_differently_on_each_replica() -> None:
    async def run() -> list[int | None]:
        replicas = Replicas(2)
        for seed in (None, None, None, 7):
            replicas.client.submit([1], SamplingParams(temperature=1.0, seed=seed))
        return [one.params.seed for sent in replicas.sent for one in sent]

    seeds = asyncio.run(run())
    assert len({*seeds}) == 4 and None not in seeds and seeds[-1] == 7


def test_the_prefix_caches_are_empty_when_all_have_said_so() -> None:
    async def run() -> None:
        replicas = Replicas(2)
        first = asyncio.ensure_future(replicas.client.reset_prefix_cache())
        await asyncio.sleep(0)
        assert replicas.sent == [[ResetPrefixCache()], [ResetPrefixCache()]]
        replicas.client.replicas.links[0].receive(Reset(True))
        await asyncio.sleep(0)
        assert not first.done()
        replicas.client.replicas.links[1].receive(Reset(True))
        assert await first
        second = asyncio.ensure_future(replicas.client.reset_prefix_cache())
        await asyncio.sleep(0)
        replicas.client.replicas.links[0].receive(Reset(True))
        replicas.die(1)
        assert not await second  # nobody knows of the other

    asyncio.run(run())


@pytest.mark.parametrize("router", ["round_robin", "least_tokens", "prefix_aware", "session"])
@pytest.mark.parametrize("victim", range(3))
def test_of_a_dead_replica_no_request_is_lost(router: str, victim: int) -> None:
    async def run() -> None:
        replicas = Replicas(3, router)
        client = replicas.client
        streams = [client.submit([number] * 3, SamplingParams()) for number in range(9)]
        mine = [one.request_id for one in replicas.sent[victim]]
        begun = mine[0]
        replicas.answer(victim, begun)
        for sent in replicas.sent:
            sent.clear()
        replicas.die(victim)
        moved = {one.request_id: one for sent in replicas.sent for one in sent}
        assert sorted(moved) == sorted(mine) and not replicas.sent[victim]
        assert [name for name, rest in moved.items() if rest.output_token_ids] == [begun]
        assert moved[begun].output_token_ids == [5] and not moved[begun].prefix
        assert client.is_alive and not client.ended.is_set()
        assert not any(one.is_over for one in streams)
        for number, sent in enumerate(replicas.sent):
            for one in sent:
                assert isinstance(one, Submit)
                replicas.answer(number, one.request_id, "length")
        assert all(client.streams[one.request_id] for one in streams if not one.is_over)
        for number in range(3):  # the dead one's number, too
            replicas.die(number)
        assert client.ended.is_set() and not client.streams
        errors = [one.error for one in streams if one.error is not None]
        assert errors and {error.status for error in errors} == {503}
        with pytest.raises(ApiError) as refused:
            client.submit([1], SamplingParams())
        assert refused.value.status == 503

    asyncio.run(run())


def test_of_an_answer_that_has_begun_another_replica_is_sent_the_rest() -> None:
    async def run() -> None:
        replicas = Replicas(2)
        params = SamplingParams(max_tokens=9, prompt_logprobs=1, deadline_ms=60_000.0)
        stream = replicas.client.submit([1, 2], params)
        (whole,) = replicas.sent[0]
        for _ in range(3):
            replicas.answer(0, "r1")
        replicas.die(0)
        (moved,) = replicas.sent[1]
        assert (moved.prompt_token_ids, moved.output_token_ids) == ([1, 2], [5, 5, 5])
        assert moved.params.seed == whole.params.seed is not None
        assert moved.params.max_tokens == 9 and moved.params.prompt_logprobs is None
        assert 0 < moved.params.deadline_ms < 60_000
        replicas.answer(1, "r1", "length")
        assert stream.is_over and stream.error is None and stream.num_output_tokens == 4
        assert replicas.client.replica_events["requests_rerouted"] == 1

    asyncio.run(run())


@pytest.mark.parametrize("params", [SamplingParams(n=2), SamplingParams(beam_width=2)])
def test_samples_and_beams_that_have_begun_end_with_an_error(params: SamplingParams) -> None:
    async def run() -> None:
        replicas = Replicas(2)
        begun, waiting = (replicas.client.submit([1], params) for _ in range(2))
        replicas.answer(0, "r1")
        replicas.die(0)
        assert begun.error is not None and begun.error.status == 500
        assert "after 1 tokens" in begun.error.message
        assert not replicas.sent[1][1:] and not waiting.is_over
        third = replicas.client.submit([1], params)
        replicas.fleet.works = True
        await asyncio.gather(*replicas.client._resizing.tasks)
        replicas.die(1)  # of these nothing has come
        assert not third.is_over and [one.request_id for one in replicas.sent[0]][1:] == []

    asyncio.run(run())


def test_a_replica_that_is_started_again_gets_requests_again() -> None:
    async def run() -> None:
        replicas = Replicas(3, disaggregated=True, prefill_replicas=1)
        client = replicas.client
        replicas.fleet.works = True
        for number in (1, 2):
            replicas.answer(number, "nobody")
            replicas.die(number)
            assert len(client.replicas.serving) == 2 and client.is_alive
            await asyncio.gather(*client._resizing.tasks)
            assert len(client.replicas.serving) == 3 and client.routing.handovers is not None
            assert client.routing.handovers.decoders.alive == {0, 1}
        events = {"lost": 2, "restarted": 2, "requests_rerouted": 0, "added": 0, "removed": 0}
        assert client.replica_events == events

    asyncio.run(run())


def test_a_silent_replica_is_dead() -> None:
    async def run() -> None:
        replicas = Replicas(2)
        client, now = replicas.client, [0.0]
        for link in client.replicas.links:
            link._silence = Silence(SILENT_S, lambda: now[0])
            link.receive(Beat())
        stream = client.submit([1], SamplingParams())
        while len(client.replicas.serving) == 2:
            now[0] += BEAT_S
            client.replicas.links[1].receive(Beat())
            for link in client.replicas.links:
                link.end_if_silent()
            await asyncio.sleep(0)
        assert SILENT_S <= now[0] <= SILENT_S + 2 * BEAT_S
        assert client.replicas.links[1].is_alive and not stream.is_over
        assert [one.request_id for one in replicas.sent[1]] == ["r1"]
        assert await client.replicas.links[0].exit_reason() == "it has not answered for 8 s"

    asyncio.run(run())


def test_a_replica_that_stays_at_one_step_is_dead() -> None:
    async def run() -> None:
        replicas = Replicas(2)
        client, now = replicas.client, [0.0]
        for link in client.replicas.links:
            link._silence = Silence(SILENT_S, lambda: now[0], step_limit_s=20.0)
        client.submit([1], SamplingParams())
        for step in range(100):
            now[0] += BEAT_S
            client.replicas.links[0].receive(Beat(7))  # it beats, and gets no further
            client.replicas.links[1].receive(Beat(step))
            for link in client.replicas.links:
                link.end_if_silent()
            await asyncio.sleep(0)
            assert client.replicas.links[0].is_alive == (now[0] <= 20.0)
        assert await client.replicas.links[0].exit_reason() == "it has been at one step for 20 s"
        assert [one.request_id for one in replicas.sent[1]] == ["r1"]

    asyncio.run(run())


def test_a_replica_that_says_it_has_failed_is_lost_before_its_process_ends() -> None:
    async def run() -> None:
        replicas = Replicas(2)
        client = replicas.client
        stream = client.submit([1], SamplingParams())
        client.replicas.links[0].receive(Failed("rank 1 was killed by SIGKILL", "error"))
        await asyncio.sleep(0)
        assert len(client.replicas.serving) == 1 and not stream.is_over
        assert [one.request_id for one in replicas.sent[1]] == ["r1"]
        assert await client.replicas.links[0].exit_reason() == "rank 1 was killed by SIGKILL"

    asyncio.run(run())


def test_a_replica_that_dies_while_others_are_built_gets_nothing() -> None:
    async def run() -> None:
        replicas = Replicas(2)
        other = EngineClient({"parallel": {"replicas": 2}}, 9)
        for link in other.replicas.links:
            link._transport = cast(Any, Transport())
            link.receive(READY)
        other.replicas.links[0].lose()
        assert not other.ended.is_set()
        other.begin([READY] * 2)
        assert other.routing.router.alive == {1} and replicas.client.routing.router.alive == {0, 1}
        assert other.replicas.states()["starting"] == 1 and not other.ended.is_set()

    asyncio.run(run())


def test_the_view_goes_on_with_another_replica() -> None:
    async def run() -> None:
        replicas = Replicas(2)
        replicas.client.replicas.watch(True)
        replicas.client.replicas.watch(True)
        assert replicas.sent == [[Watch(True), Watch(True)], []]
        replicas.die(0)
        assert replicas.sent[1] == [Watch(True)]
        replicas.client.replicas.watch(False)
        assert replicas.sent[1][1:] == [Watch(False)]
        replicas.die(1)

    asyncio.run(run())


def test_another_replica_continues_what_has_its_prompt_computed() -> None:
    async def run() -> None:
        replicas = Replicas(3, disaggregated=True, prefill_replicas=1)
        client, sent = replicas.client, replicas.sent
        params = SamplingParams(max_tokens=9, deadline_ms=60_000.0)
        streams = [client.submit([1, 2], params) for _ in range(2)]
        assert [len(one) for one in sent] == [2, 0, 0] and sent[0][0].hands_over
        done = Prefix("r1", b"keys")
        replicas.answer(0, "r1")
        client.replicas.links[0].receive(done)
        (rest,) = sent[1]
        assert (rest.prefix, rest.output_token_ids, rest.hands_over) == (b"keys", [5], None)
        assert rest.params.seed == sent[0][0].params.seed is not None
        assert 0 < rest.params.deadline_ms < 60_000
        replicas.answer(1, "r1", "length")
        assert streams[0].is_over and streams[0].num_output_tokens == 2
        client._abort(streams[1])  # its client has left
        client.replicas.links[0].receive(done._replace(request_id="r2"))
        assert sent[0][2:] == [Abort("r2")] and sent[2] == []
        assert client.routing.router.queued == [0] and client.routing.handovers is not None
        assert client.routing.handovers.decoders.queued == [0, 0]
        for params in (SamplingParams(n=2), SamplingParams(beam_width=2)):
            client.submit([1, 2], params)
            assert not sent[0][-1].hands_over

    asyncio.run(run())


def test_the_file_of_a_request_that_ends_is_deleted(tmp_path: Path) -> None:
    async def run() -> None:
        replicas = Replicas(3, folder=str(tmp_path), disaggregated=True, handover="file")
        client, sent = replicas.client, replicas.sent
        streams = [client.submit([1, 2], SamplingParams(max_tokens=9)) for _ in range(3)]
        for number, message in enumerate(list(sent[0])):
            replicas.answer(0, message.request_id)
            if number == 2:
                client._abort(streams[2])  # its client leaves before the handover comes
            given = message.hands_over.give(b"keys")
            client.replicas.links[0].receive(Prefix(message.request_id, given))
        assert len(list(tmp_path.glob("*/0-*"))) == 2
        client._abort(streams[0])  # before another replica has read it
        assert len(list(tmp_path.glob("*/*"))) == 1
        client.replicas.links[1].lose()
        client.replicas.links[2].lose()
        assert not list(tmp_path.glob("*/*")) and streams[1].is_over
        await client.stop()
        assert not list(tmp_path.iterdir())

    asyncio.run(run())


def test_requests_are_served_while_a_replica_of_each_kind_lives() -> None:
    async def run() -> None:
        replicas = Replicas(3, disaggregated=True, prefill_replicas=1)
        client = replicas.client
        moved, waiting = (client.submit([1], SamplingParams(max_tokens=9)) for _ in range(2))
        replicas.answer(0, "r1")
        client.replicas.links[0].receive(Prefix("r1", b""))
        replicas.die(1)
        (rest,) = replicas.sent[2]  # another of its kind goes on with it
        assert rest.request_id == "r1" and rest.output_token_ids == [5] and not rest.hands_over
        assert client.is_alive and not moved.is_over and not waiting.is_over
        replicas.die(2)
        assert moved.error is not None and moved.error.status == 503
        assert not client.is_alive and client.ended.is_set()
        with pytest.raises(ApiError) as refused:
            client.submit([1], SamplingParams())
        assert refused.value.status == 503

    asyncio.run(run())


def test_the_view_goes_to_the_replica_that_is_chosen() -> None:
    async def run() -> None:
        replicas = Replicas(3)
        client, sent = replicas.client, replicas.sent
        client.replicas.watch(True)
        assert client.replicas.watched == 0
        client.replicas.watch(True, 2)
        client.replicas.watch(True)
        assert client.replicas.watched == 2
        assert sent == [[Watch(True), Watch(False)], [], [Watch(True), Watch(True)]]
        replicas.die(2)
        assert client.replicas.watched == 0 and sent[0][2:] == [Watch(True)]
        client.replicas.watch(True, 2)  # it is dead
        assert client.replicas.watched == 0 and sent[0][3:] == [Watch(True)]
        client.replicas.watch(False)
        assert sent[0][4:] == [Watch(False)] and sent[1] == []

    asyncio.run(run())
