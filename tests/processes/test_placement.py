"""Each replica has its share of the cores, or a GPU."""

from __future__ import annotations

import pytest

from minivllm.errors import BadInput
from minivllm.processes import placement
from minivllm.processes.placement import placements


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "wanted_cores", lambda runtime: {8, 9, 10, 11, 12})
    monkeypatch.delenv("MINIVLLM_THREADS", raising=False)


def test_cores_are_shared_out_whole() -> None:
    found = placements({"device": "cpu", "threads": None}, 2, [])
    assert [place["cores"] for place in found] == ["8,9", "10,11,12"]
    assert {place["threads"] for place in found} == {None}  # one a physical core of the share
    kept = placements({"device": "cpu", "threads": 1}, 5, [])
    assert [place["cores"] for place in kept] == ["8", "9", "10", "11", "12"]


def test_more_replicas_than_cores_share_them() -> None:
    found = placements({"device": "cpu", "threads": None, "cores": None}, 6, [])
    assert found == [{"device": "cpu", "threads": 1, "cores": None}] * 6
    assert placements({"threads": 3}, 6, [])[0]["threads"] == 3


def test_a_gpu_each() -> None:
    runtime = {"device": "cuda:2-4"}
    assert [place["device"] for place in placements(runtime, 2, [2, 3, 4])] == ["cuda:2", "cuda:3"]
    with pytest.raises(BadInput, match=r"parallel\.replicas=3"):
        placements(runtime, 4, [2, 3, 4])


def test_every_rank_of_a_replica_has_a_gpu() -> None:
    runtime = {"device": "cuda:0-4"}
    found = placements(runtime, 2, [0, 1, 2, 3, 4], ranks=2)
    assert [place["device"] for place in found] == ["cuda:0,1", "cuda:2,3"]
    with pytest.raises(BadInput, match=r"2 GPUs each; .*cuda:0-5, or set parallel\.replicas=2"):
        placements(runtime, 3, [0, 1, 2, 3, 4], ranks=2)
    with pytest.raises(BadInput, match=r"cuda:0-11$"):
        placements(runtime, 2, [0, 1, 2, 3, 4], ranks=6)


def test_torchrun_starts_no_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(BadInput, match=r"parallel\.replicas=2: torchrun starts"):
        placements({"device": "cpu"}, 2, [])
