"""The address of a cluster at which nobody answers is reported at once."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from minivllm.errors import BadInput
from minivllm.processes import ray_cluster
from minivllm.processes.ray_cluster import ANSWER_S


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_an_address_where_nobody_listens(address: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        whole = address.format(listener.getsockname()[1])
        ray_cluster._require_answer(whole)
    with pytest.raises(
        BadInput, match=r"nobody answers at RAY_ADDRESS=.*:\d+ within 5 s .*refused"
    ):
        ray_cluster._require_answer(whole)


@pytest.mark.parametrize("address", ["10.0.0.1:6379", "ray://head:99999", "[fd00::1]:6379"])
def test_an_address_that_swallows_packets(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def connect(where: Any, timeout_s: float) -> Any:
        asked.append((*where, timeout_s))
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(BadInput, match=r"RAY_ADDRESS=.* within 5 s \(timed out\); start"):
        ray_cluster._require_answer(address)
    ((host, _, waited_s),) = asked
    assert host in ("10.0.0.1", "head", "fd00::1") and waited_s == ANSWER_S


@pytest.mark.parametrize("word", ["auto", "local", "ray://name"])
def test_words_are_left_to_ray(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(socket, "create_connection", lambda *place: asked.append(place))
    ray_cluster._require_answer(word)
    assert not asked
