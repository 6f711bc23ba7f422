"""Records files of this process by what runs in it, or by a number that they have.

Python imports this module at the start of every process whose PYTHONPATH has this folder. The
environment variable RECORD_CALLS names the folder for `<pid>.json`, the files. Without RECORD_VALUE
these are the files whose functions are called between the signals SIGUSR1 and SIGUSR2, and
`<pid>.ready` says that the signals are handled. RECORD_VALUE is a number as `float.hex` writes it,
which is no text of the number: then these are the files of minivllm with a function that has it
when it returns, written when the process ends.

A function has a number that is an argument, a local or what it returns, be it within a text; or
where it returns an object that has the number, or has one that was not given to it. In analysis/
and report/, where every function has all records, an object counts only where it is returned, and
not what a comprehension makes, which has no frame of its own from Python 3.12 on.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

DEEPEST = 6  # objects within each other
WIDEST = 1000  # items of a list or a dictionary that are looked at
HOLDERS = ("/minivllm/analysis/", "/minivllm/report/")
PLAIN = (str, bytes, int, float, type(None), type, ModuleType, FunctionType)  # hold nothing
# Where a number comes from: objects are searched from the first call of one of these on.
SOURCES = ("/bench/driver.py", "/bench/completion.py", "/records/reading.py")

_seen: dict[str, None] = {}  # in the order in which they are seen first
_recording = False


def _note(frame: Any, event: str, arg: object) -> None:
    if _recording and event == "call":
        _seen[frame.f_code.co_filename] = None


def _begin(*_: object) -> None:
    global _recording
    _recording = True


def _end(*_: object) -> None:
    global _recording
    _recording = False
    part = _place("part")
    part.write_text(json.dumps([*_seen]))
    part.rename(_place("json"))  # whole, or absent


def _place(suffix: str) -> Path:
    return Path(os.environ["RECORD_CALLS"]) / f"{os.getpid()}.{suffix}"


def _ready() -> None:
    _place("ready").touch()


def holders_of(number: float) -> Callable[[Any, str, object], None]:
    """What a profiler calls to note the files that have a number."""
    text = repr(number)
    is_near = False

    def is_it(value: Any) -> bool:
        kind = type(value)
        if kind is float:
            return bool(value == number)
        return (kind is str and text in value) or (kind is bytes and text.encode() in value)

    def has(value: Any, depth: int = DEEPEST) -> bool:
        if is_it(value):
            return True
        if not depth or isinstance(value, PLAIN):
            return False
        inside = vars(value) if hasattr(value, "__dict__") else value
        inside = inside.values() if isinstance(inside, dict) else inside
        items = [*inside][:WIDEST] if isinstance(inside, (list, tuple, type({}.values()))) else ()
        return any(has(item, depth - 1) for item in items)

    def note(frame: Any, event: str, arg: object) -> None:
        nonlocal is_near
        code, file = frame.f_code, frame.f_code.co_filename
        is_near = is_near or file.endswith(SOURCES)
        is_module = code.co_name == "<module>"
        if event != "return" or file in _seen or "/minivllm/" not in file or is_module:
            return
        values = frame.f_locals
        found = any(map(is_it, (arg, *values.values())))
        if is_near and not found:
            given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            holds = any(place in file for place in HOLDERS)
            own = [] if holds else [*values.keys() - {*given}]
            returned = () if holds and code.co_name.endswith("comp>") else (arg,)
            found = any(map(has, (*returned, *(values[name] for name in own))))
        if found:
            _seen[file] = None

    return note


if "RECORD_CALLS" in os.environ:
    if "RECORD_VALUE" in os.environ:
        profiler = holders_of(float.fromhex(os.environ["RECORD_VALUE"]))
        atexit.register(_end)
    else:
        signal.signal(signal.SIGUSR1, _begin)
        signal.signal(signal.SIGUSR2, _end)
        os.register_at_fork(after_in_child=_ready)
        _ready()
        profiler = _note
    threading.setprofile(profiler)
    sys.setprofile(profiler)
