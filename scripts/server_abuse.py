"""A server under load and abuse: clients that leave, that do not read, and ten times too many.

    python scripts/server_abuse.py --output reports/examples/cpu/server_abuse.json
    python scripts/server_abuse.py --short
    python scripts/server_abuse.py --soak-minutes 30 --output soak.json

Two servers of the embedded model are started, each with its engine on core 0; this process and HTTP
share core 1. Every part ends with no request in the engine and no block in use, or it raises.
Blocks of the KV cache take memory when they are first used: the soak uses each of them before its
first round, and raises where memory grows after that round.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from program import exit_code, new_parser, write_record

from minivllm.bench.records.identity import code_hash
from minivllm.platform.processes.children import module_path

ROOT = Path(__file__).resolve().parents[1]
COMMON = ("preset=serve", "task.port=0", "runtime.device=cpu", "runtime.threads=1")
PINNED = ("runtime.cores=0", "task.cores=1")
# With few blocks, each is soon used for the first time, which is when it takes memory.
NUM_BLOCKS = 1500
PATIENT = (
    *("task.slow_reader_pieces=64", "task.client_timeout_s=3", "task.drain_s=5"),
    f"cache.num_blocks={NUM_BLOCKS}",
)
# As many wait as run, so that a request waits for about one other.
NARROW = ("batching.max_num_seqs=8", "task.max_num_queued_reqs=8")
OVERLOAD = 10.0  # arrivals, as a multiple of the capacity
OUTPUT_LEN = 256
IDLE_S = 30.0  # for the last request to end
FILLING = 2.0  # times that the tokens of a cache are sent so that each block was used
MOST_GROWTH_MB = 16  # of a process after the first round of a soak: the load's peaks differ


@dataclass
class Served:
    """A server in processes of its own."""

    port: int
    process: subprocess.Popen[str]

    def memory_mb(self) -> float:
        """Resident memory of all of its processes, in 10**6 bytes."""
        return sum(self.memories_mb().values())

    def memories_mb(self) -> dict[str, float]:
        """Resident memory of HTTP's process and of the others, the engine's, in 10**6 bytes."""
        one = psutil.Process(self.process.pid)
        others = sum(p.memory_info().rss for p in one.children(recursive=True))
        return {"http": one.memory_info().rss / 1e6, "engine": others / 1e6}


@contextlib.contextmanager
def server(*overrides: str) -> Iterator[Served]:
    """Run a server until the block ends."""
    pinned = PINNED if (os.cpu_count() or 1) > 1 else ()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "run.py"), *COMMON, *pinned, *overrides],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PYTHONPATH": module_path(), "HF_HUB_OFFLINE": "1"},
        )
        try:
            assert process.stdout is not None
            found = re.search(r"http://[^/]*:(\d+)", process.stdout.readline())
            if found is None:
                log.seek(0)
                raise RuntimeError(f"the server did not start: {log.read()[-2000:]}")
            own = os.sched_getaffinity(0)
            if pinned:
                os.sched_setaffinity(0, {1})
            yield Served(int(found[1]), process)
            os.sched_setaffinity(0, own)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


# ---- requests


def request(path: str, body: dict[str, Any] | None = None) -> bytes:
    """A request by the byte; one without a body is a GET."""
    data = b"" if body is None else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def completion(rng: random.Random, max_tokens: int, **others: Any) -> bytes:
    """A request for tokens of a random prompt."""
    ids = [rng.randrange(5, 500) for _ in range(rng.randint(4, 64))]
    body = {"prompt": ids, "max_tokens": max_tokens, "ignore_eos": True, **others}
    return request("/v1/completions", body)


@dataclass
class Answer:
    """What a client got; times on the clock of `time.perf_counter`."""

    status: int  # 0: the connection ended without an answer
    begin_s: float
    first_s: float  # the first byte after the head
    end_s: float
    body: bytes  # of a connection that ended without an answer how it did
    retry_after_s: int | None = None


async def ask(port: int, data: bytes) -> Answer:
    """Send a request and read its answer."""
    begin = time.perf_counter()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.read(1)
        first = time.perf_counter()
        body += await reader.read()
        writer.close()
    except (OSError, asyncio.IncompleteReadError) as error:
        now = time.perf_counter()
        return Answer(0, begin, now, now, f"{error!r} after {now - begin:.1f} s".encode())
    again = re.search(rb"\r\nretry-after: (\d+)\r\n", head, re.IGNORECASE)
    told = None if again is None else int(again[1])
    return Answer(int(head[9:12]), begin, first, time.perf_counter(), body, told)


async def figures(port: int) -> dict[str, float]:
    """The gauges of the engine, and what clients did."""
    text = (await ask(port, request("/metrics"))).body.decode()
    pairs = re.findall(r"^minivllm:(\w+)\{([^}]*)\} (\S+)$", text, re.MULTILINE)
    found = {}
    for name, labels, value in pairs:
        event = re.search(r'event="(\w+)"', labels)
        found[event[1] if event else name] = float(value)
    return found


async def until_idle(port: int) -> None:
    """Wait until the engine has no request and every block is free. Raises RuntimeError."""
    deadline = time.perf_counter() + IDLE_S
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    while time.perf_counter() < deadline:
        now = await figures(port)
        if not any(now[name] for name in names):
            return
        await asyncio.sleep(0.002)
    raise RuntimeError(f"requests do not end, or blocks are lost: {now}")


def spread(values: Sequence[float]) -> dict[str, float | int]:
    """Median, high percentiles and maximum."""
    if len(values) < 2:
        return {"n": len(values)}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    shown = {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "max": max(values)}
    return {name: round(value, 3) for name, value in shown.items()} | {"n": len(values)}


# ---- parts


async def leave(port: int, rng: random.Random) -> None:
    """Be a client that closes its connection at a random moment."""
    data = completion(rng, rng.randint(1, 400), stream=rng.random() < 0.5, n=rng.choice((1, 1, 3)))
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    if rng.random() < 0.1:
        data = data[: rng.randrange(1, len(data))]
    writer.write(data)
    await asyncio.sleep(rng.expovariate(20))
    if rng.random() < 0.5:
        writer.transport.abort()
    writer.close()


async def disconnects(one: Served, count: int, seed: int = 0) -> dict[str, Any]:
    """Random disconnects, 32 clients at a time; and how long the blocks of a lone one stay."""
    rng, room = random.Random(seed), asyncio.Semaphore(32)

    async def client() -> None:
        async with room:
            await leave(one.port, rng)

    memory, freed = [], list[float]()
    for _ in range(4):
        await asyncio.gather(*(client() for _ in range(count // 4)))
        await until_idle(one.port)
        memory.append(round(one.memory_mb()))
    for number in range(min(20, count)):
        _, writer = await asyncio.open_connection("127.0.0.1", one.port)
        writer.write(completion(rng, 1500, stream=number % 2 == 0))
        while not (await figures(one.port))["num_requests_running"]:
            pass
        writer.close()
        begin = time.perf_counter()
        await until_idle(one.port)
        freed.append(1e3 * (time.perf_counter() - begin))
    return {
        "clients": count,
        "left": (await figures(one.port))["clients_left"],
        "blocks_free_after_ms": spread(freed),
        "memory_mb_after_each_quarter": memory,
    }


async def slow_readers(one: Served, count: int) -> dict[str, Any]:
    """Clients that read nothing, 25 at a time, until the server has cut each off."""
    rng, memory = random.Random(1), list[int]()
    cut, already = 0, (await figures(one.port))["slow_readers"]
    for begin in range(0, count, 25):
        sockets = []
        for _ in range(min(25, count - begin)):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", one.port))
            client.sendall(completion(rng, 1800, stream=True, logprobs=20))
            sockets.append(client)
        while (await figures(one.port))["slow_readers"] < already + begin + len(sockets):
            await asyncio.sleep(0.1)
        for client in sockets:
            client.settimeout(5)
            with contextlib.suppress(ConnectionError), client:
                while client.recv(1 << 16):
                    pass
            cut += 1
        await until_idle(one.port)
        memory.append(round(one.memory_mb()))
    return {"clients": count, "cut_off": cut, "memory_mb_after_each_25": memory}


async def capacity(one: Served, seconds: float) -> tuple[float, list[float]]:
    """Requests a second with as many clients as may run and wait, and their times to the first
    token in milliseconds."""
    rng, done, ttft = random.Random(2), 0, list[float]()
    end = time.perf_counter() + seconds

    async def client() -> None:
        nonlocal done
        while time.perf_counter() < end:
            answer = await ask(one.port, completion(rng, OUTPUT_LEN, stream=True))
            if answer.status == 200 and answer.end_s < end:
                done += 1
                ttft.append(1e3 * (answer.first_s - answer.begin_s))

    await asyncio.gather(*(client() for _ in range(16)))
    return done / seconds, ttft


async def overload(one: Served, seconds: float, capacity_s: float) -> dict[str, Any]:
    """Poisson arrivals at ten times the capacity. Raises RuntimeError where one gets no answer."""
    await capacity(one, min(2.0, capacity_s))
    rate, idle_ttft = 0.0, list[float]()
    while not rate:  # other work on the machine may leave no request enough time
        rate, idle_ttft = await capacity(one, capacity_s)
        capacity_s *= 2
    before, rng = one.memory_mb(), random.Random(3)
    tasks: list[asyncio.Task[Answer]] = []
    lags = []
    begin = due = time.perf_counter()
    while due < begin + seconds:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        lags.append(1e3 * (time.perf_counter() - due))
        tasks.append(asyncio.create_task(ask(one.port, completion(rng, OUTPUT_LEN, stream=True))))
        due += rng.expovariate(OVERLOAD * rate)
    answers = await asyncio.gather(*tasks)
    statuses = Counter(answer.status for answer in answers)
    if lost := [answer.body.decode() for answer in answers if not answer.status]:
        raise RuntimeError(f"{len(lost)} of {len(answers)} requests got no answer: {lost[0]}")
    served = [answer for answer in answers if answer.status == 200]
    if not all(answer.body.endswith(b"0\r\n\r\n") for answer in served):
        raise RuntimeError("an answer was cut short")
    await until_idle(one.port)
    again = [a.retry_after_s for a in answers if a.status == 429]
    if None in again:
        raise RuntimeError("a refusal does not say when to try again")
    refused = [1e3 * (a.end_s - a.begin_s) for a in answers if a.status == 429]
    last = max((answer.end_s for answer in served), default=begin)
    return {
        "seconds": seconds,
        "arrivals": len(answers),
        "arrivals_a_s": round(len(answers) / seconds, 1),
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "capacity_requests_a_s": round(rate, 2),
        "served_requests_a_s": round(len(served) / (last - begin), 2),
        "ttft_ms_at_capacity": spread(idle_ttft),
        "ttft_ms_served": spread([1e3 * (a.first_s - a.begin_s) for a in served]),
        "refused_after_ms": spread(refused),
        "retry_after_s": spread([s for s in again if s is not None]),
        "generator_lag_ms": spread(lags),
        "memory_mb": {"before": round(before), "after": round(one.memory_mb())},
    }


async def fill(one: Served) -> dict[str, Any]:
    """Use every block of the cache once, which gives each its memory. Raises RuntimeError where a
    prompt is refused."""
    before, rng = one.memories_mb(), random.Random(4)
    info = json.loads((await ask(one.port, request("/view/info"))).body)
    length = info["max_model_len"] - 2
    left = FILLING * NUM_BLOCKS * info["block_size"]
    while left > 0:
        prompt = [rng.randrange(5, 500) for _ in range(length)]
        answer = await ask(
            one.port, request("/v1/completions", {"prompt": prompt, "max_tokens": 1})
        )
        if answer.status != 200:
            raise RuntimeError(f"a prompt was refused: {answer.body!r}")
        left -= length
    await until_idle(one.port)
    return {"before": rounded(before), "after": rounded(one.memories_mb())}


def rounded(memories: dict[str, float]) -> dict[str, int]:
    """Whole megabytes."""
    return {name: round(value) for name, value in memories.items()}


async def soak(one: Served, seconds: float) -> dict[str, Any]:
    """Rounds of disconnects, slow readers and overload until the time is over."""
    end = time.monotonic() + seconds
    filled = await fill(one)
    rounds: list[dict[str, Any]] = []
    while time.monotonic() < end or len(rounds) < 2:
        await disconnects(one, 200, seed=len(rounds))
        await slow_readers(one, 25)
        loaded = await overload(one, 20.0, 3.0)
        kept = {name: loaded[name] for name in ("served_requests_a_s", "statuses")}
        rounds.append({**kept, "memory_mb": rounded(one.memories_mb())})
        print(json.dumps(rounds[-1]), file=sys.stderr)
    return {"filling_mb": filled, "rounds": rounds}


def require_flat(rounds: Sequence[dict[str, Any]]) -> None:
    """Raise RuntimeError where a process has grown by more than MOST_GROWTH_MB since the first
    round."""
    first, last = rounds[0]["memory_mb"], rounds[-1]["memory_mb"]
    for name in first:
        if last[name] - first[name] > MOST_GROWTH_MB:
            raise RuntimeError(
                f"memory of {name} has grown from {first[name]} MB after the first round to "
                f"{last[name]} MB after {len(rounds)}"
            )


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point; see the module's docstring."""
    parser = new_parser(__doc__, help="where to keep the record, as JSON")
    parser.add_argument("--disconnects", type=int, default=1000)
    parser.add_argument("--slow-readers", type=int, default=200)
    parser.add_argument("--overload-s", type=float, default=60.0)
    parser.add_argument("--capacity-s", type=float, default=15.0)
    parser.add_argument("--soak-minutes", type=float, default=0.0, help="only rounds of all parts")
    parser.add_argument("--short", action="store_true", help="a tenth of everything")
    args = parser.parse_args(arguments)
    part = 0.1 if args.short else 1.0
    found: dict[str, Any] = {"cores": os.cpu_count(), "code_hash": code_hash()}
    if args.soak_minutes:
        with server(*PATIENT, *NARROW, "task.max_num_queued_reqs=64") as one:
            found |= asyncio.run(soak(one, 60 * args.soak_minutes))
    else:
        with server(*PATIENT) as one:
            found["disconnects"] = asyncio.run(disconnects(one, int(part * args.disconnects)))
            found["slow_readers"] = asyncio.run(slow_readers(one, int(part * args.slow_readers)))
        with server(*NARROW) as one:
            found["overload"] = asyncio.run(
                overload(one, part * args.overload_s, max(6.0, part * args.capacity_s))
            )
    print(json.dumps(found, indent=1))
    write_record(args.output, found)
    if args.soak_minutes:
        require_flat(found["rounds"])


if __name__ == "__main__":
    sys.exit(exit_code(main))
