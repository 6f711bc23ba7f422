"""Ranks that find one another: those that rank 0 has started, and those of `torchrun`."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from ipaddress import ip_address
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from minivllm.errors import BadInput, Crashed, first_line
from minivllm.parallel.ranks import LOOPBACK, GroupRanks
from minivllm.platform.processes.channel import prepare_tcp
from minivllm.platform.processes.heartbeat import Beat, beating

JOIN = timedelta(minutes=2)  # for all ranks to find one another
CALLS = "calls"  # key of the store: where rank 0 is to be reached
ANY_PORT = 9
STUCK_S = 5.0  # of a rank that waits for one that has died
STORE = "store"  # file of the store, in the folder of ranks that rank 0 has started


def prepare(channel: Connection) -> None:
    """Let a channel over TCP not hold back the end of a long message for an acknowledgement, and
    end where the other host is gone."""
    if sys.platform != "win32":
        with socket.socket(fileno=os.dup(channel.fileno())) as same:
            prepare_tcp(same)


class Launch:
    """The place of this process among those that `torchrun` has started."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.host = os.environ["MASTER_ADDR"]

    @property
    def address(self) -> str:
        """This machine's address on the way to rank 0, which need not be that of its name.

        Raises:
            BadInput: torchrun names an address of rank 0 that only its own machine can reach, or to
                which there is no way by IPv4, which all ranks use.
        """
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((self.host, ANY_PORT))  # sends nothing
                address = str(probe.getsockname()[0])
        except OSError as error:
            raise BadInput(
                f"torchrun places rank 0 at {self.host}, to which there is no way by "
                f"IPv4 ({error.strerror or error})"
            ) from None
        if self.local_size < self.size and ip_address(address).is_loopback:
            raise BadInput(
                f"torchrun places rank 0 for all machines at {self.host}, which is {address} "
                "there: give each torchrun its machine's address with --local-addr"
            )
        return address

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
        machine: this machine's address, where ranks are on several.

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
        machine: str = LOOPBACK,
    ) -> None:
        self._store, self._numbers, self._machine = store, (rank, size, on_this_machine), machine
        self.local_rank = rank if local_rank is None else local_rank
        address, key = json.loads(store.get(CALLS))
        where = tuple(address) if isinstance(address, list) else address
        self._channel = Client(where, authkey=bytes.fromhex(key))
        prepare(self._channel)
        self._lock = threading.Lock()  # two threads send
        self._done = threading.Event()
        self.say(rank)

    @classmethod
    def started(cls, folder: str, size: int, rank: int) -> Place:
        """That of a process which rank 0 has started, whose folder has the sockets."""
        store = FileStore(str(Path(folder) / STORE), size)
        store.set_timeout(JOIN)
        return cls(store, rank, size, size)

    @classmethod
    def launched(cls, launch: Launch) -> Place:
        """That of a process which `torchrun` has started."""
        numbers = launch.rank, launch.size, launch.local_size, launch.local_rank
        return cls(launch.store, *numbers, launch.address)

    def join(self, device: torch.device) -> GroupRanks:
        """This rank among all, with its device."""
        if not hasattr(self, "ranks"):
            self.ranks = GroupRanks(self._store, *self._numbers, device, self._machine)
        return self.ranks

    def heard(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """What rank 0 says, until it is gone.

        Raises:
            Crashed: the link to it is lost.
        """
        while True:
            try:
                message = self._channel.recv()
            except (EOFError, ConnectionError):
                return
            except OSError as error:
                raise Crashed(f"the link to rank 0 is lost: {first_line(error)}") from None
            yield message

    def say(self, message: Any) -> None:
        """Send rank 0 a message.

        Raises:
            OSError: rank 0 is gone.
        """
        with self._lock:
            self._channel.send(message)

    @contextmanager
    def beating(self) -> Iterator[None]:
        """While it is open, rank 0 gets signs of life. Once it is gone, this process ends within
        STUCK_S, though a collective waits."""
        try:
            with beating(self._beat):
                yield
        finally:
            self._done.set()

    def _beat(self) -> None:
        try:
            self.say(Beat())
        except OSError:
            if not self._done.wait(STUCK_S):
                os.write(2, b"rank 0 is gone, and a collective waits for it\n")
                os._exit(1)
            raise
