"""Ranks: the processes that compute one model together, and what they combine within a step.

Two operations are enough for tensor parallelism: a sum over all ranks, which each of them gets, and
columns side by side, which rank 0 gets. Every rank calls them in the same order with tensors of the
same shape.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

# Of a collective, for ranks that build their parts at different speeds. A rank that dies or falls
# silent is noticed within seconds.
TIMEOUT = timedelta(minutes=5)
LOOPBACK = "127.0.0.1"


@dataclass
class Traffic:
    """What a rank has given to collectives.

    Attributes:
        collectives: their number.
        num_bytes: of the tensors that this rank gave.
        seconds: spent in them, with the wait for slower ranks. On a GPU, where the host does not
            wait for them, this is the time of their launch alone.
    """

    collectives: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


class Ranks(Protocol):
    """This process among those that compute a model.

    Attributes:
        rank: its number; rank 0 plans steps and chooses tokens.
        size: how many there are.
        on_this_machine: how many of them share this machine's memory and cores.
        traffic: what it has given to collectives.
    """

    rank: int
    size: int
    on_this_machine: int
    traffic: Traffic

    def all_reduce(self, x: Tensor, largest: bool = False) -> Tensor:
        """The sum of x over all ranks (or the largest of each element), the same bits on each. It
        may be written to the memory of x."""

    def gather(self, x: Tensor) -> Tensor:
        """The columns of all ranks in their order, [rows, columns] to [rows, size * columns], on
        rank 0; every other rank gets x back."""

    def least(self, number: int) -> int:
        """The smallest of a number over all ranks; of what those of a machine share, a rank's own
        share."""


class SingleRank:
    """The only rank; see Ranks."""

    rank, size, on_this_machine = 0, 1, 1

    def __init__(self) -> None:
        self.traffic = Traffic()

    def all_reduce(self, x: Tensor, largest: bool = False) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor:
        return x

    def least(self, number: int) -> int:
        return number


ONE_RANK = SingleRank()
Join = Callable[[torch.device], Ranks]  # gives this process its rank, with its device


def alone(device: torch.device) -> Ranks:
    """The only rank."""
    return ONE_RANK


class GroupRanks:
    """One of several ranks; see Ranks.

    The group of torch.distributed is no global one, so that a process can have several engines.

    Args:
        store: through which the ranks find one another.
        rank, size, on_this_machine: see Ranks.
        device: of this rank's tensors: gloo on a CPU, NCCL on a GPU.
        address: of this machine, where ranks are on several.

    Attributes:
        waiting_since: when the host began to wait for a collective; None while it does not.
    """

    waiting_since: float | None = None

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        on_this_machine: int,
        device: torch.device,
        address: str = LOOPBACK,
    ) -> None:
        self.rank, self.size, self.on_this_machine = rank, size, on_this_machine
        self.traffic, self._device = Traffic(), device
        self._group: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = TIMEOUT
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            local = on_this_machine == size
            # The stubs do not know how torch itself names a device.
            gloo: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            gloo._timeout = TIMEOUT
            at = {"hostname": LOOPBACK if local else address}
            if not local and (name := os.environ.get("GLOO_SOCKET_IFNAME")):
                at = {"interface": name}
            gloo._devices = [dist.ProcessGroupGloo.create_device(**at)]
            self._group = dist.ProcessGroupGloo(store, rank, size, gloo)

    def all_reduce(self, x: Tensor, largest: bool = False) -> Tensor:
        if not x.numel():
            return x
        x, options = x.contiguous(), dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
        with self._counted(x):
            self._group.allreduce([x], options).wait()
        return x

    def gather(self, x: Tensor) -> Tensor:
        is_root, options = self.rank == 0, dist.GatherOptions()
        options.rootRank = 0
        columns = [torch.empty_like(x) for _ in range(self.size * is_root)]
        if x.numel():
            with self._counted(x):
                self._group.gather([columns] * is_root, [x.contiguous()], options).wait()
        return torch.cat(columns, 1) if is_root else x

    def least(self, number: int) -> int:
        share = number if self._device.type == "cuda" else number // self.on_this_machine
        return -int(self.all_reduce(torch.tensor([-share], device=self._device), largest=True))

    def abort(self) -> None:
        """Let collectives fail that wait for a rank which has died. Over gloo they do by
        themselves; NCCL's would wait forever."""
        if self._device.type == "cuda" and self._group is not None:
            self._group.abort()

    def close(self) -> None:
        """Free the group's connections and ports."""
        self._group = None

    @contextmanager
    def _counted(self, x: Tensor) -> Iterator[None]:
        self.waiting_since = begin = time.perf_counter()
        yield
        self.waiting_since, traffic = None, self.traffic
        traffic.seconds += time.perf_counter() - begin
        traffic.collectives += 1
        traffic.num_bytes += x.nbytes
