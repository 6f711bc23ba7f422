"""Kills (SIGKILL) of replicas and ranks at random moments, and what is told and left of them.

    python scripts/kill_replicas.py --output reports/examples/cpu/kill_replicas.json
    python scripts/kill_replicas.py --times 1 --kinds replica server
    python scripts/kill_replicas.py --kinds actor actor_server     # replicas in actors of Ray

The embedded model on the CPU, with two replicas or two ranks. `replica`, `actor`, `rank` (1) and
`rank_0` are killed in the measured window of a benchmark, whose record must say `crashed` and who
died. Behind a server a replica is killed while it has running and waiting requests: each must be
answered. Then all replicas that run are killed, and the server must end. After each
kill nothing may be left: processes, folders, the port. What is not so raises AssertionError.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from leftovers import adopt_orphans, assert_nothing_is_left, family, ports_of, until
from program import exit_code, new_parser, write_record

from minivllm.bench import supervisor
from minivllm.bench.records import identity, storage
from minivllm.bench.records.identity import code_hash
from minivllm.config.compose import compose
from minivllm.platform.processes.children import module_path

ROOT = Path(__file__).resolve().parents[1]
COMMON = ("runtime.device=cpu", "runtime.threads=1")
LONG = (  # a window of some seconds, with work left at any moment of the first
    *("measure.roofline=false", "workload.num_requests=8", "workload.output_len=1500"),
    "cache.num_blocks=2000",
)
TWO, BY_RAY = "parallel.replicas=2", "parallel.backend=ray"
REPLICA, ACTOR, RANK = "replicas.replica", "ray::RayHost", "processes.rank"
BENCHES = {  # kind: overrides, what a command line of those to be killed has
    "replica": ((TWO,), REPLICA),
    "actor": ((TWO, BY_RAY), ACTOR),
    "rank": (("parallel.tensor=2",), RANK),
    "rank_0": (("parallel.tensor=2",), "bench.worker"),
}
SERVE = (
    *("preset=serve", "task.port=0", TWO),
    *("batching.max_num_seqs=4", "parallel.router=round_robin"),
)
SERVERS = {"server": ((), "engine_process"), "actor_server": ((BY_RAY,), ACTOR)}
MOST_S = 10.0  # from a kill to its record
LATEST_S = 1.0  # of a kill in a measured window
CLIENTS, TOKENS = 16, 400


# ---- a benchmark


def kill_in_a_benchmark(kind: str, number: int, folder: Path, rng: random.Random) -> dict[str, Any]:
    """One kill in a measured window, and its record."""
    overrides, word = BENCHES[kind]
    config = compose([*COMMON, *LONG, *overrides])
    (measurement,) = identity.expand(config, kind, str(number), folder, "fingerprint")
    before, killed = set(family()), dict[str, Any]()

    def kill() -> None:
        victims = family(word)
        killed["ports"] = ports_of(family())
        killed["pid"] = victims[number % len(victims)].pid
        killed["s"] = time.time()
        os.kill(killed["pid"], signal.SIGKILL)

    def hear(event: dict[str, Any]) -> None:
        if event["event"] == "measuring" and event["tokens"] and "at" not in killed:
            killed["at"] = rng.uniform(0.0, LATEST_S)
            threading.Timer(killed["at"], kill).start()

    (outcome,) = supervisor.run([measurement], hear)
    path = measurement.path / storage.RECORD
    assert "s" in killed, "the window was over before the kill"
    told_s = path.stat().st_mtime - killed["s"]
    gone_s = assert_nothing_is_left(before, killed["ports"])
    record = json.loads(path.read_text())
    message = record["error"]["message"]
    assert outcome.status == record["status"] == "crashed", record["status"]
    assert told_s < MOST_S, f"the record came after {told_s:.1f} s"
    named = {"replica": "exit code -9", "actor": str(killed["pid"]), "rank": "rank 1 was killed"}
    assert named.get(kind, "") in message, message
    return {"record_after_s": round(told_s, 3), "gone_after_s": round(gone_s, 3), "says": message}


# ---- a server


@contextlib.contextmanager
def server(*overrides: str) -> Iterator[tuple[int, subprocess.Popen[str], Path]]:
    """A server of two replicas: its port, its process and its log."""
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "run.py"), *SERVE, *COMMON, *overrides],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PYTHONPATH": module_path(), "HF_HUB_OFFLINE": "1"},
        )
        try:
            assert process.stdout is not None
            found = re.search(r"http://[^/]*:(\d+)", process.stdout.readline())
            assert found, f"the server did not start: {Path(log.name).read_text()[-2000:]}"
            yield int(found[1]), process, Path(log.name)
        finally:
            process.terminate()
            process.wait(60)


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    """Status and body of an answer; status 0: the connection ended before its end."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        method = "GET" if body is None else "POST"
        headers = {"content-type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except (OSError, http.client.HTTPException) as error:
        return 0, str(error)
    finally:
        connection.close()


def fate(port: int, number: int, tokens: int = TOKENS) -> str:
    """What became of a request: answered, ended with an error, refused, or lost."""
    streamed = number % 2 == 0
    body = {"prompt": [5, 6, 7 + number], "max_tokens": tokens, "ignore_eos": True}
    status, text = ask(port, "/v1/completions", {**body, "stream": streamed})
    if status == 200 and streamed and not text.rstrip().endswith("[DONE]"):
        return "error" if '"error"' in text else "lost"
    if status == 200:
        return "error" if '"error"' in text else "answered"
    return {500: "error", 503: "refused"}.get(status, "lost")


def running(port: int) -> float:
    """Requests that the engines run."""
    text = ask(port, "/metrics")[1]
    return sum(map(float, re.findall(r"^minivllm:num_requests_running\{.*\} (\S+)$", text, re.M)))


def kill_behind_a_server(
    kind: str, number: int, folder: Path, rng: random.Random
) -> dict[str, Any]:
    """Kill one replica of a server under load, and then all."""
    overrides, word = SERVERS[kind]
    before = set(family())
    with server(*overrides) as (port, process, log):
        fates: Counter[str] = Counter()

        def client(index: int) -> None:
            fates[fate(port, index)] += 1

        clients = [threading.Thread(target=client, args=(i,)) for i in range(CLIENTS)]
        for one in clients:
            one.start()
        until(lambda: running(port) >= 8, 30.0, "the batches do not fill")
        time.sleep(rng.uniform(0.0, 0.3))
        victims, ports = family(word), ports_of(family())
        victims[number % 2].kill()
        told_s = until(lambda: "has stopped" in log.read_text(), MOST_S, "no word of the death")
        healthy = ask(port, "/health")[0]
        for one in clients:
            one.join(120)
        after = Counter(fate(port, index, 8) for index in range(4))
        warning = next(line for line in log.read_text().splitlines() if "has stopped" in line)
        last = [threading.Thread(target=client, args=(i,)) for i in range(4)]
        answered = Counter(fates)
        for one in last:
            one.start()
        until(lambda: running(port) >= 4, 30.0, "the last requests do not run")
        begin = time.monotonic()
        for one in family(word):
            one.kill()  # the first has perhaps been started again
        code = process.wait(MOST_S)
        ended_s = time.monotonic() - begin
        for one in last:
            one.join(10)
        ending = fates - answered
    gone_s = assert_nothing_is_left(before, ports)
    assert healthy == 200 and code == 1, (healthy, code)
    assert sum(answered.values()) == CLIENTS and not answered["lost"], answered
    assert not answered["refused"] and not answered["error"], answered
    assert after == {"answered": 4}, after
    assert sum(ending.values()) == 4 and not ending["answered"] + ending["lost"], ending
    return {
        "told_after_s": round(told_s, 3),
        "fates": dict(answered),
        "fates_of_last": dict(ending),
        "ended_after_s": round(ended_s, 3),
        "gone_after_s": round(gone_s, 3),
        "says": warning,
    }


def summary(kills: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Times as a list and the greatest, fates as sums, and the first of the messages."""
    found: dict[str, Any] = {"kills": len(kills), "first_says": kills[0]["says"]}
    for name in kills[0]:
        values = [kill[name] for kill in kills]
        if name.startswith("fates"):
            found[name] = dict(sum(map(Counter, values), Counter()))
        elif name != "says":
            found |= {f"most_{name}": max(values), name: values}
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point; see the module's docstring."""
    kinds = {**dict.fromkeys(BENCHES, kill_in_a_benchmark)}
    kinds |= dict.fromkeys(SERVERS, kill_behind_a_server)
    parser = new_parser(
        __doc__, help="where to keep the record, as JSON; one that is there keeps its other kinds"
    )
    parser.add_argument("--times", type=int, default=10, help="kills of each kind")
    parser.add_argument(
        "--kinds", nargs="*", choices=[*kinds], default=["replica", "rank", "server"]
    )
    args = parser.parse_args(arguments)
    adopt_orphans()
    found: dict[str, Any] = {}
    if args.output is not None and args.output.exists():
        found = json.loads(args.output.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="k") as own:  # what is left there is ours
        os.environ["TMPDIR"] = tempfile.tempdir = own
        for kind in args.kinds:
            kills = []
            for number in range(args.times):
                with tempfile.TemporaryDirectory() as folder:
                    kills.append(kinds[kind](kind, number, Path(folder), random.Random(number)))
                print(json.dumps({kind: kills[-1]}), file=sys.stderr, flush=True)
            found[kind] = {**summary(kills), "code_hash": code_hash()}
    print(json.dumps(found, indent=1))
    write_record(args.output, found)


if __name__ == "__main__":
    sys.exit(exit_code(main))
