"""What one viewer of a server costs the engine: rounds with a viewer at 20 messages a second, and
without, in turns.

    python scripts/view_cost.py --output reports/examples/cpu/view_cost.json

A server of the embedded model, whose step is short, so that all that is not the model weighs most,
answers 1 and 32 streams. The engine has core 0 and one thread; HTTP, the clients and the viewer
share core 1. A round is one answer of a fixed length for each stream. Rounds come in threes, in
changing order: nobody watches, nobody watches again (A/A), one viewer reads /ws/events. Each is
compared with the first by

- processor time of the engine's process for each token of a stream, which is a step: the steadier
  figure;
- time from the first request to the last token.

A block's ratio is the median over its threes. The ratio of a figure is the pseudomedian over blocks
with its confidence interval, beside the smallest effect that the blocks would have found (the
method of `task=compare`).

What the engine's events cost while nobody watches is measured by scripts/step_cost.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from program import compared, exit_code, new_parser, write_figures

ROOT = Path(__file__).resolve().parents[1]
ENGINE_CORE, CLIENT_CORE = 0, 1
STREAMS = (1, 32)
TOKENS = {1: 1000, 32: 200}  # of each answer
THREES = 4  # in a block
ARMS = ("nobody", "nobody again", "viewer")


@dataclass(frozen=True)
class Measured:
    """One round."""

    cpu_us: float  # of the engine's process, for each token of a stream
    wall_s: float


class Server:
    """A server of the embedded model.

    Args:
        streams: requests at a time.
    """

    def __init__(self, streams: int) -> None:
        words = [sys.executable, "run.py", "preset=serve", "task.port=0", "runtime.device=cpu"]
        words += ["runtime.threads=1", f"runtime.cores={ENGINE_CORE}", f"task.cores={CLIENT_CORE}"]
        words += [f"batching.max_num_seqs={streams}", "decoding=greedy"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}  # it logs every request
        self._process = subprocess.Popen(words, cwd=ROOT, text=True, **pipes)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if (found := re.search(r"http://([\d.]+):(\d+)", line)) is None:
            raise SystemExit("the server did not start; python run.py preset=serve says why")
        self.host, self.port = found[1], int(found[2])
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        (self.engine, *_) = map(int, children.read_text().split())

    def cpu_s(self) -> float:
        """Processor time of the engine's process so far."""
        threads = Path(f"/proc/{self.engine}/task").glob("*/schedstat")
        return 1e-9 * sum(int(one.read_text().split()[0]) for one in threads)

    def answer(self, tokens: int) -> None:
        """Read one streamed answer of so many tokens."""
        body = {"prompt": "x", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        with socket.create_connection((self.host, self.port)) as one:
            one.sendall(request("POST", "/v1/completions", json.dumps(body).encode()))
            end = b""
            while data := one.recv(1 << 16):
                end = (end + data)[-64:]
        if b"[DONE]" not in end:
            raise SystemExit(f"an answer has not ended: {end!r}")

    def until_nobody_watches(self) -> None:
        """Wait until the last viewer's end is known."""
        while True:
            with socket.create_connection((self.host, self.port)) as one:
                one.sendall(request("GET", "/metrics"))
                text = b"".join(iter(lambda: one.recv(1 << 16), b""))
            if re.search(rb"num_viewers\{.*\} 0\.0", text):
                return

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()


def request(method: str, path: str, body: bytes = b"") -> bytes:
    """A request after which the connection closes."""
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def view(url: str) -> None:
    """Read /ws/events of a server as fast as it comes; says so once the first message is there."""
    from websockets.sync.client import connect

    with connect(url, max_size=None, compression=None) as events:
        events.recv()
        print("it watches", flush=True)
        for _ in events:
            pass


@contextmanager
def viewer(server: Server) -> Iterator[None]:
    """One viewer in a process of its own while the context is open."""
    url = f"ws://{server.host}:{server.port}/ws/events"
    words = [sys.executable, __file__, "--view", url]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise SystemExit("the viewer could not connect")
        yield
        process.kill()
    server.until_nobody_watches()


def measured_round(server: Server, streams: int) -> Measured:
    """One answer for each stream, all at a time."""
    tokens = TOKENS[streams]
    clients = [threading.Thread(target=server.answer, args=(tokens,)) for _ in range(streams)]
    cpu_s, begin = server.cpu_s(), time.perf_counter()
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    wall_s = time.perf_counter() - begin
    return Measured(1e6 * (server.cpu_s() - cpu_s) / tokens, wall_s)


def threes(server: Server, streams: int) -> Iterator[dict[str, Measured]]:
    """Rounds of all arms, in every order in turn, without end."""
    for order in itertools.cycle(itertools.permutations(ARMS)):
        found = {}
        for arm in order:
            if arm == "viewer":
                with viewer(server):
                    found[arm] = measured_round(server, streams)
            else:
                found[arm] = measured_round(server, streams)
        yield found


def figures(streams: int, blocks: Sequence[Sequence[dict[str, Measured]]]) -> list[dict[str, Any]]:
    """What the blocks say of both figures and both comparisons."""
    rows = []
    for name, (arm, what) in itertools.product(
        ("cpu_us", "wall_s"), (("viewer", "one viewer"), ("nobody again", "A/A"))
    ):
        logs = [
            statistics.median(
                math.log(getattr(one[arm], name) / getattr(one[ARMS[0]], name)) for one in block
            )
            for block in blocks
        ]
        nobody = statistics.median(getattr(one[ARMS[0]], name) for block in blocks for one in block)
        rows.append(
            {
                "streams": streams,
                "compared": what,
                "figure": name,
                "nobody": nobody,
                **compared(logs),
            }
        )
    return rows


def main() -> None:
    """Entry point; see the module's docstring."""
    parser = new_parser(__doc__, help="also write the figures to this file")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--streams", type=int, nargs="+", choices=STREAMS, default=STREAMS)
    parser.add_argument("--view", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.view:
        view(args.view)
        return

    rows, cores = [], os.sched_getaffinity(0)
    for streams in args.streams:
        os.sched_setaffinity(0, cores)
        server = Server(streams)
        os.sched_setaffinity(0, {CLIENT_CORE})
        try:
            rounds = threes(server, streams)
            next(rounds)  # warms up
            blocks = [list(itertools.islice(rounds, THREES)) for _ in range(args.blocks)]
        finally:
            server.close()
        rows += figures(streams, blocks)
        print(json.dumps(rows[-4:], indent=1), flush=True)
    what = "an engine with one viewer, and with none, over its server, in turns"
    found = {"what": what, "figures": rows}
    write_figures(args.output, found, "runtime.device=cpu", "runtime.threads=1")


if __name__ == "__main__":
    sys.exit(exit_code(main))
