"""The load that a server sends to itself."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from minivllm.engine.options import SamplingParams
from minivllm.processes.messages import Piece
from minivllm.serving.errors import ApiError, overloaded
from minivllm.serving.http.calls import CALL, Call
from minivllm.serving.processes.token_stream import TokenStream
from minivllm.serving.view import load as module
from minivllm.serving.view.load import PRIORITY, LoadBody, SyntheticLoad
from tests.serving.plain import call_json
from tests.serving.running import RunningServer, until_idle
from tests.serving.view.following import watching


class Served:
    """A service whose requests a test ends."""

    def __init__(self) -> None:
        self.info = SimpleNamespace(max_model_len=128, vocab_size=50)
        self.is_draining = self.is_full = False
        self.asked: list[tuple[list[int], SamplingParams]] = []
        self.streams: list[TokenStream] = []
        self.aborted: list[TokenStream] = []

    def start(self, prompts: list[list[int]], params: SamplingParams) -> list[TokenStream]:
        assert CALL.get() is None  # no part of the call that set the load
        if self.is_full:
            raise overloaded("the queue is full", 1)
        (prompt,) = prompts
        self.asked.append((prompt, params))
        self.streams.append(TokenStream("r", 1, len(prompt), 99, self.aborted.append))
        return self.streams[-1:]

    def finish(self) -> None:
        """End what runs."""
        for stream in self.streams:
            if not stream.is_over:
                stream.push(Piece("r", 0, 5, 1, "", "length", None, None, 0, None, None), 0.0)


async def until(is_so: Any) -> None:
    while not is_so():
        await asyncio.sleep(0.001)


def test_requests_come_until_the_load_ends() -> None:
    async def test() -> None:
        served = Served()
        load = SyntheticLoad(cast(Any, served))
        CALL.set(Call("x", "here"))
        load.set(LoadBody(rate=200, input_len=20, output_len=7))
        await until(lambda: len(served.asked) >= 40)
        served.finish()
        load.set(LoadBody(rate=0, input_len=20, output_len=7))
        count = len(served.asked)
        await asyncio.sleep(0.05)
        assert len(served.asked) == count
        prompts = [prompt for prompt, _ in served.asked]
        assert {len(prompt) for prompt in prompts} == {20}
        assert all(0 <= token < 50 for prompt in prompts for token in prompt)
        assert len({tuple(prompt) for prompt in prompts}) == len(prompts)
        params = served.asked[0][1]
        assert (params.max_tokens, params.priority, params.ignore_eos) == (7, PRIORITY, True)
        load.stop()

    asyncio.run(test())


@pytest.mark.parametrize("lengths", [{}, {"input_len": 20, "output_len": 7}])
def test_half_of_the_prompts_share_a_prefix(lengths: dict[str, int]) -> None:
    async def test() -> None:
        served = Served()
        load = SyntheticLoad(cast(Any, served))
        load.set(LoadBody(rate=200, **lengths))
        await until(lambda: len(served.asked) >= 40)
        load.stop()
        halves = [tuple(prompt[: len(prompt) // 2]) for prompt, _ in served.asked]
        assert len(set(halves)) < len(halves) - 3

    asyncio.run(test())


def test_no_prompt_is_made_of_a_load_that_ends() -> None:
    served = Served()
    load = SyntheticLoad(cast(Any, served))
    load.set(LoadBody(rate=0, input_len=1 << 62))  # which no memory holds
    assert not served.asked


def test_it_is_bounded_and_its_end_ends_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_UNFINISHED", 3)

    async def test() -> None:
        served = Served()
        load = SyntheticLoad(cast(Any, served))
        load.set(LoadBody(rate=200))
        await until(lambda: len(served.asked) == 3)
        await asyncio.sleep(0.05)
        assert len(served.asked) == 3
        served.finish()
        await until(lambda: len(served.asked) > 3)
        load.stop()
        await until(lambda: all(stream.is_over for stream in served.streams))
        assert served.aborted and set(served.aborted) <= set(served.streams[3:])

    asyncio.run(test())


def test_a_refused_request_is_left_out_and_a_drain_ends_the_load() -> None:
    async def test() -> None:
        served = Served()
        served.is_full = True
        load = SyntheticLoad(cast(Any, served))
        load.set(LoadBody(rate=200))
        await asyncio.sleep(0.05)
        served.is_full = False
        await until(lambda: len(served.asked) >= 2)
        served.is_draining = True
        await until(lambda: all(stream.is_over for stream in served.streams))
        count = len(served.asked)
        await asyncio.sleep(0.05)
        assert len(served.asked) == count

    asyncio.run(test())


def test_requests_that_cannot_fit_are_refused_at_once() -> None:
    load = SyntheticLoad(cast(Any, Served()))
    with pytest.raises(ApiError, match="input_len \\+ output_len is 129, and the context 128"):
        load.set(LoadBody(rate=1, input_len=97, output_len=32))
    load.set(LoadBody(rate=0, input_len=97))


def test_a_server_is_loaded_while_somebody_watches(server: RunningServer) -> None:
    url = f"{server.url}/view/load"
    status, answer = call_json(url, {"rate": 10})
    assert status == 409 and "nobody watches" in answer["error"]["message"]
    assert call_json(url, {"rate": 0})[0] == 200
    with watching(server) as viewer:
        viewer.until(lambda one: one.bundles)
        for wrong in ({"rate": 201}, {"rate": -1}, {"rate": 1, "input_len": 0}, {"rat": 1}, {},
                      {"rate": 1, "burst": 2}, {"rate": 1, "input_len": 9999}):  # fmt: skip
            assert call_json(url, wrong)[0] == 400
        assert call_json(url, {"rate": 40, "input_len": 48, "output_len": 500}) == (
            *(200, {"rate": 40.0, "input_len": 48, "output_len": 500}),
        )
        viewer.until(lambda one: len(one.view.requests) > 5)
        (made, *_) = [one.new for one in viewer.view.requests.values()]
        assert made[2:5] == (48, 548, PRIORITY)
    until_idle(server)
