"""Collectives of ranks, which are threads here."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from minivllm.parallel.ranks import ONE_RANK, GroupRanks, Ranks

CPU = torch.device("cpu")
Result = TypeVar("Result")


def on_each(size: int, folder: Path, work: Callable[[Ranks], Result]) -> list[Result]:
    """What each of so many ranks returns, in their order."""

    def run(rank: int) -> Result:
        store = FileStore(str(folder / "store"), size)
        return work(GroupRanks(store, rank, size, size, CPU))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_every_rank_gets_the_sum_and_the_largest(dtype: torch.dtype, tmp_path: Path) -> None:
    def work(ranks: Ranks) -> tuple[Tensor, Tensor]:
        own = torch.tensor([[1, -5], [2, 7]]).to(dtype) * (ranks.rank + 1)
        return ranks.all_reduce(own.clone()), ranks.all_reduce(own, largest=True)

    for total, largest in on_each(3, tmp_path, work):
        assert total.tolist() == [[6, -30], [12, 42]]
        assert largest.tolist() == [[3, -5], [6, 21]]


def test_rank_0_alone_gets_the_columns_of_all(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> Tensor:
        return ranks.gather(torch.tensor([[1.0, 2.0], [3.0, 4.0]]) + 10 * ranks.rank)

    first, second = on_each(2, tmp_path, work)
    assert first.tolist() == [[1, 2, 11, 12], [3, 4, 13, 14]]
    assert second.tolist() == [[11, 12], [13, 14]]


def test_what_is_empty_is_not_sent_and_the_rest_is_counted(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> tuple[int, int, float]:
        assert ranks.gather(torch.empty(0, 4)).shape[0] == 0
        ranks.all_reduce(torch.empty(0))
        assert ranks.traffic.collectives == 0
        ranks.all_reduce(torch.ones(5)[::2])
        return ranks.traffic.collectives, ranks.traffic.num_bytes, ranks.traffic.seconds

    for collectives, num_bytes, seconds in on_each(2, tmp_path, work):
        assert (collectives, num_bytes) == (1, 12) and seconds > 0


def test_ranks_agree_on_the_least_of_what_they_share(tmp_path: Path) -> None:
    assert on_each(2, tmp_path, lambda ranks: ranks.least(100 + ranks.rank)) == [50, 50]


def test_a_single_rank_computes_alone() -> None:
    x = torch.ones(2, 3)
    assert ONE_RANK.all_reduce(x) is x and ONE_RANK.gather(x) is x and ONE_RANK.least(7) == 7
    assert ONE_RANK.traffic.collectives == 0
