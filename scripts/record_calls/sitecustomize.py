"""Records which files run in this process between the signals SIGUSR1 and SIGUSR2.

Python imports this module at the start of every process whose PYTHONPATH has this folder. The
environment variable RECORD_CALLS names the folder for `<pid>.ready`, which says that the signals
are handled, and for `<pid>.json`, the files whose functions were called.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

_seen: set[str] = set()
_recording = False


def _note(frame: object, event: str, arg: object) -> None:
    if _recording and event == "call":
        _seen.add(frame.f_code.co_filename)  # type: ignore[attr-defined]


def _begin(*_: object) -> None:
    global _recording
    _recording = True


def _end(*_: object) -> None:
    global _recording
    _recording = False
    part = _place("part")
    part.write_text(json.dumps(sorted(_seen)))
    part.rename(_place("json"))  # whole, or absent


def _place(suffix: str) -> Path:
    return Path(os.environ["RECORD_CALLS"]) / f"{os.getpid()}.{suffix}"


def _ready() -> None:
    _place("ready").touch()


if "RECORD_CALLS" in os.environ:
    signal.signal(signal.SIGUSR1, _begin)
    signal.signal(signal.SIGUSR2, _end)
    threading.setprofile(_note)
    sys.setprofile(_note)
    os.register_at_fork(after_in_child=_ready)
    _ready()
