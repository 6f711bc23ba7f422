"""The Ray cluster that actors run on: one that exists, or one of this machine that is started."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from minivllm.errors import BadInput, NotInstalled, first_line, install
from minivllm.platform.folders import TemporaryFolder

OBJECT_STORE = 100_000_000  # bytes: no object is put there, and Ray asks for at least 75 MiB
ANSWER_S = 5.0  # for the address of a cluster to take a connection
MOST = 250  # characters of what Ray says
NEEDED = "parallel.backend=ray needs Ray"
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # GPUs have the numbers that `runtime.device` names, whatever an actor reserves.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray's 15 gives an actor a core only where nobody else wants it, this process included.
    "RAY_worker_niceness": "0",
}


class RayCluster:
    """The cluster that `RAY_ADDRESS` names, or without it one of this machine, which ends with this
    object or with this process.

    Attributes:
        ray: the module, connected.

    Args:
        address: of an existing cluster; None starts one.
        needed: amounts of its resources, by their names.

    Raises:
        NotInstalled: Ray is not installed.
        BadInput: there is no such cluster, or it has too little.
    """

    def __init__(self, address: str | None, needed: Mapping[str, float]) -> None:
        try:
            import ray
        except ImportError as error:
            raise NotInstalled(f"{NEEDED} ({first_line(error)}): {install('ray')}") from None
        self.ray: Any = ray
        self._connected = False
        self._folder: TemporaryFolder | None = None
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        if not ray.is_initialized():
            if address:
                _require_answer(address)
            options = {"address": address} if address else self._own(int(needed["CPU"]))
            try:
                with _kept_handlers():
                    ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
            except (ConnectionError, RuntimeError, ValueError, OSError) as error:
                why = _last_line(error.__cause__ or error)  # Ray wraps what a cluster reports
                raise BadInput(
                    f"parallel.backend=ray: RAY_ADDRESS={address} is no cluster that can be "
                    f"used ({why}); start one with `ray start --head`, or unset "
                    "RAY_ADDRESS, and one is started on this machine"
                    if address
                    else f"parallel.backend=ray: no cluster can be started on this machine: {why}"
                ) from None
            self._connected = True
            atexit.register(self.close)  # before Ray's own: the folder is removed after the end
        try:
            self._require(needed)
        except BaseException:
            self.close()
            raise

    def _own(self, cpus: int) -> dict[str, Any]:
        """Arguments of `ray.init` for a cluster of this machine, with its files in a folder of its
        own: a short name, for sockets are among them."""
        self._folder = TemporaryFolder("ray-")
        return {
            "address": "local",
            "num_cpus": cpus,
            "num_gpus": 0,
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE,
            "_temp_dir": self._folder.path,
        }

    def _require(self, needed: Mapping[str, float]) -> None:
        total = self.ray.cluster_resources()
        for name, amount in needed.items():
            if amount > (there := total.get(name, 0.0)):
                raise BadInput(
                    f"parallel.backend=ray: the replicas need {amount:g} {name}s, and the cluster "
                    f"has {there:g}"
                )

    def has(self) -> str:
        """What the cluster has."""
        return _amounts(self.ray.cluster_resources())

    def free(self) -> str:
        """What of it is free."""
        return _amounts(self.ray.available_resources())

    def close(self) -> None:
        """Leave the cluster, and end it if it was started here."""
        if self._connected:
            self._connected = False
            atexit.unregister(self.close)
            with _kept_handlers():
                self.ray.shutdown()
            if self._folder is not None:
                self._folder.close()


def _require_answer(address: str) -> None:
    """Raise BadInput where nobody listens at an address, which Ray would try for long. Words as
    `auto` are left to Ray."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise BadInput(
            f"parallel.backend=ray: nobody answers at RAY_ADDRESS={address} within "
            f"{ANSWER_S:.0f} s ({first_line(error)}); start a cluster there with "
            "`ray start --head`, or unset RAY_ADDRESS, and one is started on this machine"
        ) from None


def _last_line(error: BaseException) -> str:
    """An error in a line: the end of a traceback, if there is one in its text."""
    _, traced, lines = str(error).strip().partition("Traceback (most recent call last):\n")
    return lines.splitlines()[-1].strip()[:MOST] if traced else first_line(error)


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0.0):g} {name}s" for name in ("CPU", "GPU"))


@contextmanager
def _kept_handlers() -> Iterator[None]:
    """While it is open a library may set handlers of signals, which end with it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def require_ray(parallel: Mapping[str, Any]) -> None:
    """Raise NotInstalled where `parallel.backend` needs Ray and it is not installed."""
    several = parallel.get("replicas", 1) > 1
    if several and parallel["backend"] == "ray" and find_spec("ray") is None:
        raise NotInstalled(f"{NEEDED}, which is not installed: {install('ray')}")
