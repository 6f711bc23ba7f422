"""Asynchronous streams: the tokens of plain ones, a free event loop, and an end by cancellation."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm import LLM, BadInput, SamplingParams
from minivllm.streams import EngineRequests
from tests.reference import make_checkpoint

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("one")
    make_checkpoint(folder, "qwen3")
    with LLM(str(folder), quant="fp32", device="cpu", overrides=["cache.num_blocks=50"]) as llm:
        yield llm


async def read(llm: LLM, token: int, params: SamplingParams = PARAMS) -> list[int | None]:
    """The tokens of an asynchronous stream."""
    return [piece.token_id async for piece in llm.stream([token], params)]


def test_several_at_once_share_the_steps_and_give_the_tokens_of_plain_streams(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [[piece.token_id for piece in llm.stream([token], PARAMS)] for token in (5, 6, 7)]
    threads: list[int] = []
    step = llm.engine.step

    def stepped(*arguments: Any) -> Any:
        threads.append(threading.get_ident())
        return step(*arguments)

    monkeypatch.setattr(llm.engine, "step", stepped)

    async def both() -> list[list[int | None]]:
        return await asyncio.gather(*(read(llm, token) for token in (5, 6, 7)))

    assert asyncio.run(both()) == alone
    assert len(threads) < 2 * PARAMS.max_tokens  # type: ignore[operator]
    assert len(set(threads)) == 1 and threading.get_ident() not in threads


def test_the_worker_has_the_processors_and_the_gpu_of_the_thread_that_made_the_engine(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    had: list[tuple[str, int, bool]] = []
    here = threading.get_ident()

    def note(name: str) -> Callable[[int], None]:
        return lambda value: had.append((name, value, threading.get_ident() != here))

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", note("gpu"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    monkeypatch.setattr(torch, "set_num_threads", note("threads"))
    requests = EngineRequests(llm.engine)
    requests._executor().submit(int).result()
    requests.close()
    assert had == [("threads", 5, True), ("gpu", 3, True)]


def test_cancelling_the_task_that_waits_ends_its_request_alone(llm: LLM) -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(prompt: Sequence[int], output: Sequence[int]) -> range:
        if len(output) == 2:
            entered.set()
            left.append(leave.wait(60))
        return range(100)

    left: list[bool] = []
    expected = [piece.token_id for piece in llm.stream([6], PARAMS)]

    async def cancelled() -> list[int | None]:
        other = asyncio.create_task(read(llm, 6))
        task = asyncio.create_task(read(llm, 5, replace(PARAMS, token_mask=slow, max_tokens=200)))
        assert await asyncio.to_thread(entered.wait, 60)
        task.cancel()
        await asyncio.sleep(0)  # the loop is free while the step runs
        leave.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await other

    assert asyncio.run(cancelled()) == expected
    assert left == [True]  # the loop did not wait for the step
    assert not llm.engine.has_unfinished and not llm.engine.cache.pool.num_used


def test_leaving_a_stream_early_ends_its_request(llm: LLM) -> None:
    async def left() -> None:
        async with aclosing(llm.stream([5], PARAMS)) as stream:
            async for _ in stream:
                break
        assert not llm.engine.has_unfinished and not llm.engine.cache.pool.num_used
        dropped = llm.stream([5], PARAMS)
        await anext(dropped)
        assert llm.engine.has_unfinished
        del dropped

    asyncio.run(left())
    llm._requests._executor().submit(int).result()  # the thread has let go of its last piece
    assert not llm._requests.uncollected


def test_an_error_ends_an_asynchronous_stream_after_its_tokens(llm: LLM) -> None:
    def mask(prompt: Sequence[int], output: Sequence[int]) -> range:
        if len(output) == 2:
            raise ZeroDivisionError("mine")
        return range(100)

    got: list[int | None] = []

    async def fails() -> None:
        async for piece in llm.stream([5], replace(PARAMS, token_mask=mask)):
            got.append(piece.token_id)

    with pytest.raises(ZeroDivisionError, match="mine"):
        asyncio.run(fails())
    assert len(got) == 2 and not llm.engine.has_unfinished


def test_a_step_that_fails_in_another_thread_ends_a_batch(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed() -> list[Any]:
        llm.engine.abort_all()
        return []

    monkeypatch.setattr(llm.engine, "step", failed)
    [output] = llm.generate([[5]], PARAMS)
    assert output.outputs[0].finish_reason == "abort" and not output.outputs[0].token_ids


def test_a_stream_of_a_closed_one_says_so(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3")
    llm = LLM(str(tmp_path), device="cpu", overrides=["cache.num_blocks=50"])

    async def closed() -> None:
        stream = llm.stream([5], PARAMS)
        await anext(stream)
        llm.close()
        with pytest.raises(BadInput, match="this LLM is closed"):
            await anext(stream)
        await stream.aclose()

    asyncio.run(closed())
