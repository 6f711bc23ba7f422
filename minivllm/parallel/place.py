"""Ranks that find one another: those that rank 0 has started, and those of `torchrun`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from minivllm.parallel.ranks import GroupRanks

JOIN = timedelta(minutes=2)  # for all ranks to find one another
CALLS = "calls"  # key of the store: where rank 0 is to be reached
STORE = "store"  # file of the store, in the folder of ranks that rank 0 has started


class Launch:
    """The place of this process among those that `torchrun` has started."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.host = os.environ["MASTER_ADDR"]

    @property
    def store(self) -> Store:
        """Through which the ranks find one another."""
        store, _, _ = next(rendezvous("env://", timeout=JOIN))
        return PrefixStore("minivllm", store)


def launched() -> Launch | None:
    """The place of this process where `torchrun` has started it; otherwise None."""
    return Launch() if "TORCHELASTIC_RUN_ID" in os.environ else None


class Place:
    """A rank other than 0, as its own process has it.

    Args:
        store: through which the ranks find one another.
        rank, size, on_this_machine: see Ranks.
        local_rank: its number among those of this machine; None: `rank`.

    Attributes:
        ranks: this rank among all, once `join` has returned.
    """

    ranks: GroupRanks

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        on_this_machine: int,
        local_rank: int | None = None,
    ) -> None:
        self._store, self._numbers = store, (rank, size, on_this_machine)
        self.local_rank = rank if local_rank is None else local_rank
        address, key = json.loads(store.get(CALLS))
        where = tuple(address) if isinstance(address, list) else address
        self.channel = Client(where, authkey=bytes.fromhex(key))

    @classmethod
    def started(cls, folder: str, size: int, rank: int) -> Place:
        """That of a process which rank 0 has started, whose folder has the sockets."""
        return cls(FileStore(str(Path(folder) / STORE), size), rank, size, size)

    @classmethod
    def launched(cls, launch: Launch) -> Place:
        """That of a process which `torchrun` has started."""
        return cls(launch.store, launch.rank, launch.size, launch.local_size, launch.local_rank)

    def join(self, device: torch.device) -> GroupRanks:
        """This rank among all, with its device."""
        if not hasattr(self, "ranks"):
            self.ranks = GroupRanks(self._store, *self._numbers, device)
        return self.ranks

    def heard(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """What rank 0 says, until it is gone."""
        with suppress(EOFError, ConnectionError):
            while True:
                yield self.channel.recv()
