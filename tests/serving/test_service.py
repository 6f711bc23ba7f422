"""Admission: what waits for the engine is counted by completion."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from minivllm.processes.messages import Piece
from minivllm.serving.errors import ApiError
from minivllm.serving.options import ServeOptions
from minivllm.serving.processes.token_stream import Streams, TokenStream
from minivllm.serving.service import Service

MOST = 8


@pytest.fixture
def service() -> Iterator[Service]:
    """One whose engine holds the streams that a test puts there."""

    class Client(Streams):
        is_alive = True

    options = ServeOptions(max_num_queued_reqs=MOST, max_num_queued_tokens=100)
    yield Service(options, cast(Any, Client()), cast(Any, None), None, "m")


def add(service: Service, name: str, num_completions: int, num_tokens: int = 10) -> TokenStream:
    stream = TokenStream(name, num_completions, num_tokens, 100, lambda stream: None)
    service.client.streams[name] = stream
    return stream


def token(completion: int) -> Piece:
    return Piece("r", completion, 5, 1, "", None, None, None, 0, None, None)


def refused(service: Service, *more: int) -> int | None:
    """The status of what cannot be admitted."""
    try:
        service.admit(*more)
    except ApiError as error:
        return error.status
    return None


def test_every_completion_waits_until_its_own_first_token(service: Service) -> None:
    first = add(service, "a", 3)
    add(service, "b", 4)
    assert refused(service, 1) is None and refused(service, 2) == 429
    first.push(token(1), 0.0)
    first.push(token(1), 0.1)
    assert refused(service, 2) is None and refused(service, 3) == 429
    first.fail(ApiError(500, "gone"))  # and nothing of it waits
    assert refused(service, 4) is None and refused(service, 5) == 429


def test_the_tokens_of_a_prompt_wait_until_its_first_one(service: Service) -> None:
    stream = add(service, "a", 2, 60)
    assert refused(service, 1, 40) is None and refused(service, 1, 41) == 429
    stream.push(token(0), 0.0)
    assert refused(service, 1, 41) is None


def test_what_never_can_wait_is_no_overload(service: Service) -> None:
    words = rf"task\.max_num_queued_(reqs={MOST}|tokens=100) in one call"
    for more, param in (((MOST + 1,), "n"), ((MOST + 1, 9, 3), "prompt"), ((1, 101), "prompt")):
        with pytest.raises(ApiError, match=f"{max(more)} .* are more than {words}") as error:
            service.admit(*more)
        assert error.value.param == param
    assert refused(service, MOST + 1) == refused(service, 1, 101) == 400
    assert refused(service, MOST, 100) is None


def test_each_prompt_waits_once_a_completion(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(service, "_check", lambda ids, params: None)
    monkeypatch.setattr(service.client, "submit_all", lambda requests: [], raising=False)
    monkeypatch.setattr(service, "admit", lambda *numbers: asked.append(numbers))
    service.start([[1, 2], [3]], cast(Any, SimpleNamespace(n=4)))
    assert asked == [(8, 3, 2)]
