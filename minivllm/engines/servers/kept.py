"""A server that stays started between measurements (`engine.linger_s`), as the measurement sees
it."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from stat import S_ISDIR
from typing import IO

import psutil

from minivllm.engines.servers import keeper
from minivllm.errors import BadInput
from minivllm.platform import files
from minivllm.platform.untrusted import printable

START_S = 10.0
TAIL_LINES, TAIL = 3, 64 * 1024  # lines of the log in messages, and bytes to look for them in


def kept_root() -> Path:
    """The folder of all kept servers of this user."""
    return Path(tempfile.gettempdir()) / f"minivllm-servers-{os.getuid()}"


class KeptServer:
    """A server under a keeper; it has the methods of a `Child`.

    Attributes:
        folder: its own, for what its command needs.
        port: where it listens, or is to listen.
        found: whether it was there already.
        idle_cpu: the share of a core that it used since the measurement before; None for a new one.

    Args:
        key: of the server: the same configuration has the same.
        port: for a new one.

    Raises:
        BadInput: the folder is a link, belongs to someone else, or others may write to it.
    """

    def __init__(self, key: str, port: int) -> None:
        root = kept_root()
        root.mkdir(mode=0o700, exist_ok=True)
        found = root.lstat()  # not where a link leads, which anyone may have put there
        if found.st_uid != os.getuid() or not S_ISDIR(found.st_mode) or found.st_mode & 0o022:
            raise BadInput(
                f"engine.linger_s: {root} is a link, belongs to another user or may be written to "
                "by others: remove it"
            )
        self.folder, self.process = root / key, self
        self._lease, self._read_at = _leased(self.folder), 0
        _remove_left(root)
        state = self._state()
        self.found = state is not None
        self.port = state["port"] if state is not None else port
        self.idle_cpu = self._idle_cpu() if self.found else None

    @property
    def keeper(self) -> int:
        """The id of the process that runs it."""
        state = self._state()
        assert state is not None, "only of one that is started"
        return state["keeper"]

    def _state(self) -> Mapping[str, int] | None:
        """What the keeper says, if it is there."""
        return _alive(self.folder)

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        linger_s: float,
        suspend: bool,
    ) -> None:
        """Start it, unless it is there. Raises BadInput where it does not start."""
        if self.found:
            return
        subprocess.Popen(
            [
                *(sys.executable, "-I", keeper.__file__, str(self.folder)),
                *(str(linger_s), str(self.port), str(int(suspend)), *command),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=dict(environment),
        )
        deadline = time.monotonic() + START_S
        while self.poll() is not None:
            if time.monotonic() > deadline:
                raise BadInput(f"engine.linger_s: the server {self.exit_reason()}")
            time.sleep(keeper.LOOK_S / 10)

    def poll(self) -> int | None:
        """None while it runs, as of a process."""
        return None if self._state() is not None else 1

    def read_log(self, listen: Callable[[str], None]) -> None:
        """Pass on the whole lines that it has printed since this was called last."""
        with suppress(OSError), (self.folder / keeper.LOG).open("rb") as log:
            log.seek(self._read_at)
            for line in log:
                if not line.endswith(b"\n"):
                    return
                self._read_at += len(line)
                listen(_text(line))

    def exit_reason(self) -> str:
        """Whether it runs, and the last lines that it printed."""
        lines: list[str] = []
        with suppress(OSError), (self.folder / keeper.LOG).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL))
            lines = [text for text in map(_text, log) if text][-TAIL_LINES:]
        state = "is still running" if self.poll() is None else "has ended"
        return f"{state}; it printed last: {' | '.join(lines) or 'nothing'}"

    def stop(self, grace_s: float) -> None:
        """Leave it to its keeper, for the next measurement."""
        if (seconds := _cpu_seconds(self.folder)) is not None:
            reading = {"cpu_s": seconds, "at_s": time.monotonic()}
            files.write_json(self.folder / "left.json", reading)
        if self.poll() is not None:  # its keeper found the folder in use
            keeper.remove_unused(self.folder, self._lease)
        self._lease.close()

    def _idle_cpu(self) -> float | None:
        with suppress(OSError, ValueError, KeyError):
            left = json.loads((self.folder / "left.json").read_text(encoding="utf-8"))
            seconds, passed = _cpu_seconds(self.folder), time.monotonic() - left["at_s"]
            return None if seconds is None else (seconds - left["cpu_s"]) / passed
        return None

    def others_cpu_s(self) -> float:
        """Processor time of all other kept servers so far."""
        others = (folder for folder in kept_root().iterdir() if folder != self.folder)
        return sum(_cpu_seconds(folder) or 0.0 for folder in others)


def _leased(folder: Path) -> IO[bytes]:
    """The lease of a folder, shared; the folder is made if need be.

    A keeper that has just ended may remove the folder while this waits: it is made again then.
    """
    while True:
        folder.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):
            lease = (folder / keeper.LEASE).open("ab")
            fcntl.flock(lease, fcntl.LOCK_SH)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lease.fileno()), (folder / keeper.LEASE).stat()):
                    return lease
            lease.close()


def _remove_left(root: Path) -> None:
    """Remove folders whose keeper was killed before it could, and that nobody uses."""
    for folder in root.iterdir():
        with suppress(OSError), (folder / keeper.LEASE).open("ab") as lease:
            if _alive(folder) is None:
                keeper.remove_unused(folder, lease)


def _alive(folder: Path) -> Mapping[str, int] | None:
    """What the keeper of a folder says, if it is there."""
    with suppress(OSError, ValueError, psutil.Error):
        state: dict[str, int] = json.loads((folder / keeper.STATE).read_text())
        if psutil.Process(state["keeper"]).status() != psutil.STATUS_ZOMBIE:
            return state
    return None


def _text(line: bytes) -> str:
    return printable(line.decode("utf-8", "replace")).rstrip()


def _cpu_seconds(folder: Path) -> float | None:
    """Processor time of the server of a folder and all that it has started; None where none is
    there."""
    with suppress(OSError, ValueError, KeyError, psutil.Error):
        head = psutil.Process(json.loads((folder / keeper.STATE).read_text())["keeper"])
        times = [process.cpu_times() for process in (head, *head.children(recursive=True))]
        return float(sum(time.user + time.system for time in times))
    return None
