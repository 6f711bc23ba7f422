"""Runs a server until nobody has used it for a while: `python keeper.py FOLDER SECONDS PORT SUSPEND
COMMAND ...`.

It imports only the standard library, since it is a process of its own. FOLDER/lease is locked by
whoever uses the server; FOLDER/server.json says where it is, and is gone once it ends; FOLDER/log
is what the server printed. With SUSPEND 1 the server's processes are suspended while nobody uses
it. FOLDER is removed once the server has ended and nobody uses it.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

LOOK_S = 0.2
GRACE_S = 15.0
LEASE, STATE, LOG = "lease", "server.json", "log"
PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Let the kernel end this process with the keeper, where it can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def remove_unused(folder: Path, lease: IO[bytes]) -> bool:
    """Remove the folder of a server that has ended, unless its lease is held by someone else.

    Returns:
        Whether it was not in use.
    """
    try:
        fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    shutil.rmtree(folder, ignore_errors=True)
    return True


def send(group: int, number: int) -> None:
    """Send a signal to all processes of a group, if there are any."""
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def keep(folder: Path, linger_s: float, port: int, suspend: bool, command: list[str]) -> None:
    """Start the server, and end it when it was not in use for so long, or on a signal.

    The server has a process group of its own. If the keeper is killed while the server is
    suspended, the kernel resumes the group, which is then orphaned, so that it can end.
    """

    def leave(*_: Any) -> None:
        raise SystemExit

    signal.signal(signal.SIGTERM, leave)
    with (folder / LOG).open("wb") as log, (folder / LEASE).open("wb") as lease:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent,
            process_group=0,
        )
        state = {"keeper": os.getpid(), "server": server.pid, "port": port}
        (folder / "new").write_text(json.dumps(state), encoding="utf-8")
        os.replace(folder / "new", folder / STATE)
        try:
            used_s, suspended = time.monotonic(), False
            while server.poll() is None:
                time.sleep(LOOK_S)
                try:
                    fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if suspended:
                        send(server.pid, signal.SIGCONT)
                    used_s, suspended = time.monotonic(), False
                    continue
                if suspend and not suspended:
                    send(server.pid, signal.SIGSTOP)
                    suspended = True
                if time.monotonic() - used_s > linger_s:
                    break  # with the lock: who comes now waits, and finds no server
                fcntl.flock(lease, fcntl.LOCK_UN)
        finally:
            (folder / STATE).unlink(missing_ok=True)
            send(server.pid, signal.SIGCONT)
            server.terminate()
            with suppress(subprocess.TimeoutExpired):
                server.wait(GRACE_S)
            remove_unused(folder, lease)
            send(server.pid, signal.SIGKILL)  # whatever it has started


if __name__ == "__main__":
    os.setsid()  # it outlives the session of the one that started it
    folder, seconds, port, suspend, *command = sys.argv[1:]
    keep(Path(folder), float(seconds), int(port), suspend == "1", command)
