"""Where the replicas of an engine run, and what starts them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest

from minivllm.errors import BadInput
from minivllm.processes.group import EngineGroup
from minivllm.processes.started import ConnectedProcess


def config(replicas: int, **runtime: Any) -> dict[str, Any]:
    return {
        "parallel": {"replicas": replicas, "tensor": 1},
        "runtime": {"device": "cpu", "threads": 1, "cores": None, **runtime},
        "model": "kept",
    }


def group(configuration: dict[str, Any], gpus: tuple[int, ...] = ()) -> EngineGroup:
    """One whose process of a replica is its configuration."""

    def start_here(of_one: Mapping[str, Any]) -> ConnectedProcess:
        return cast(ConnectedProcess, of_one)

    return EngineGroup(configuration, "a.module", lambda: gpus, start_here)


def test_each_replica_is_one_engine_at_its_place() -> None:
    whole = config(2, device="cuda:0-1")
    made = group(whole, (0, 1))
    assert [made.config_of(n)["runtime"]["device"] for n in range(2)] == ["cuda:0", "cuda:1"]
    assert made.config_of(0)["parallel"]["replicas"] == 1 and made.config_of(1)["model"] == "kept"
    made.request(1)
    assert made.start(1) == made.poll(1) == made.config_of(1)
    made.close()


def test_a_lone_engine_has_the_configuration_as_it_is_and_cannot_grow() -> None:
    whole = config(1)
    made = group(whole)
    assert made.config_of(0) is whole and made.name == "processes"
    with pytest.raises(BadInput, match=r"one engine has all of this server's cores or GPUs"):
        made.require_room(2)


def test_room_for_more_is_a_gpu_each_or_shared_cores() -> None:
    made = group(config(2, device="cuda:0-2"), (0, 1, 2))
    made.require_room(3)
    assert made.config_of(2)["runtime"]["device"] == "cuda:2"
    with pytest.raises(BadInput, match="4 replicas need a GPU each"):
        made.require_room(4)
    made = group(config(2))
    first = [made.config_of(n)["runtime"] for n in range(2)]
    made.require_room(5)
    made.require_room(3)
    assert [made.config_of(n)["runtime"] for n in range(5)] == [*first, *first, first[0]]
