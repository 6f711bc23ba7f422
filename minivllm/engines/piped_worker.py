"""The other end of `PipedEngine`: runs in the peer's own interpreter, and imports nothing but the
standard library and the file of one engine.

    python piped_worker.py ENGINE_FILE RESULTS_FD

The class that is the file's `WORKER` drives the engine:

    build(...) -> what was settled on    takes the first command
    add(id, [token ids], {...})          takes a request; raises ValueError for one that it rejects
    busy                                 whether a request is unfinished
    step() -> [[id, [token ids], finish reason or null, cached or null], ...]
    reset(clear)                         ends what is left; `clear`: empties the prefix cache

See `PipedEngine` for the messages, which have a descriptor of their own, so that nothing that the
engine prints can disturb them.
"""

from __future__ import annotations

import json
import os
import queue
import runpy
import sys
import threading
from typing import Any

# In this file's folder other modules are named as the libraries are. (vLLM's processes run these
# lines, too.)
sys.path[:] = [place for place in sys.path if place != os.path.dirname(os.path.abspath(__file__))]


def listen(commands: queue.Queue[Any]) -> None:
    """Take commands in as they come; None when standard input ends."""
    for line in sys.stdin.buffer:
        commands.put(json.loads(line))
    commands.put(None)


def send(descriptor: int, **message: Any) -> None:
    """Write a message."""
    data = (json.dumps(message) + "\n").encode()
    while data:
        data = data[os.write(descriptor, data) :]


def serve(worker: Any, commands: queue.Queue[Any], descriptor: int) -> None:
    """Follow commands until standard input ends; the tokens of a step leave at once."""
    while True:
        try:
            command = commands.get(block=not worker.busy)
        except queue.Empty:
            if tokens := worker.step():
                send(descriptor, tokens=tokens)
            continue
        if command is None:
            return
        if "reset" in command:
            worker.reset(command["reset"])
            send(descriptor, reset=True)
        for request in command.get("add", ()):
            try:
                worker.add(*request)
            except ValueError as error:
                send(descriptor, refused=[request[0], str(error)])


def main(file: str, descriptor: int) -> None:
    """Build an engine, then serve."""
    commands: queue.Queue[Any] = queue.Queue()
    threading.Thread(target=listen, args=(commands,), daemon=True).start()
    worker = runpy.run_path(file)["WORKER"]()
    try:
        send(descriptor, ready=worker.build(**commands.get()))
        serve(worker, commands, descriptor)
    except Exception as error:
        send(descriptor, error=str(error) or type(error).__name__, type=type(error).__name__)
        raise


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
