"""Faults of processes that compute together, and what becomes of requests and what is left.

    python scripts/faults.py --output reports/examples/cpu/faults.json
    python scripts/faults.py --sorts replica rank --moments decoding --faults kill

Each case is a server of the embedded model on the CPU with four streamed requests, and one fault:
a process is killed (SIGKILL) or stopped (SIGSTOP), or its connections are cut, while the server
loads, in prompts, in decoding, or while the server drains. `host_actor` and `host_rank` are on two
hosts, which are network namespaces (as root); there the link loses every packet.

Each request must end with the tokens of an undisturbed run or with an error, within 15 s of the
fault (where a busy machine needs more than 5 s for the undisturbed requests, in as many times
15 s), and what is left must be nothing: processes, ports, shared memory, folders. What is not so
stands in the row, and the exit code is 1.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fault_servers import SORTS, START_S, Sort, port_of, reported_port, started, victims
from kill_replicas import ask, running
from leftovers import (
    adopt_orphans,
    assert_nothing_is_left,
    family,
    listening,
    ports_of,
    shared_memory,
    until,
    until_none,
)
from program import exit_code, new_parser
from two_hosts import NotPermitted, TwoHosts

from minivllm.bench.records.identity import code_hash
from minivllm.platform import files
from minivllm.platform.processes.heartbeat import SILENT_STARTING_S

MOMENTS = ("load", "prompt", "decoding", "draining")
FAULTS = ("kill", "stop", "cut")
END_S = 15.0  # from a fault to the end of each request
LEAVE_S = 60.0  # for a server to end
WORK_S = 5.0  # that is left for a request at most
CLIENTS, PROMPT, TOKENS = 4, 160, 32
PIDFD_GETFD = 438  # number of the system call


@dataclass
class Request:
    """A request and what came of it."""

    tokens: list[int] = field(default_factory=list)
    is_whole: bool = False
    error: str | None = None
    end_s: float = 0.0

    def run(self, port: int, number: int) -> None:
        """Send it, and read its stream."""
        rng = random.Random(number)
        body = {
            **{"prompt": [rng.randrange(10, 250) for _ in range(PROMPT)], "stream": True},
            **{"max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True},
            **{"temperature": 0.9, "seed": number},
        }
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)
        try:
            headers = {"content-type": "application/json"}
            link.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = link.getresponse()
            if answer.status != 200:
                self.error = f"{answer.status} {answer.read().decode()}"
                return
            for line in answer:
                self._take(line.decode().strip())
        except (OSError, http.client.HTTPException) as error:
            self.tokens.append(-1)  # neither its tokens nor an error
            self.error = f"lost: {error}"
        finally:
            link.close()
            self.end_s = time.monotonic()

    def _take(self, line: str) -> None:
        if line == "data: [DONE]":
            self.is_whole = self.error is None
        elif line.startswith("data: "):
            event = json.loads(line[6:])
            if "error" in event:
                self.error = json.dumps(event["error"])
            for choice in event.get("choices", ()):
                self.tokens += choice.get("token_ids") or []


class Load:
    """The requests of a case, each in a thread."""

    def __init__(self, port: int) -> None:
        self.requests = [Request() for _ in range(CLIENTS)]
        self._threads = [
            threading.Thread(target=one.run, args=(port, number), daemon=True)
            for number, one in enumerate(self.requests)
        ]
        for thread in self._threads:
            thread.start()

    def have_each(self, count: int) -> bool:
        """Whether each request has so many tokens."""
        return all(len(one.tokens) >= count for one in self.requests)

    def progress(self) -> tuple[list[int], list[float]]:
        """How many tokens each request has, and when it ended."""
        return [len(one.tokens) for one in self.requests], [one.end_s for one in self.requests]

    def join(self) -> list[Request]:
        """The requests, when all have ended."""
        for thread in self._threads:
            thread.join(START_S)
        return self.requests


# ---- faults


def cut(pid: int) -> None:
    """End every connection of a process, as if both ends had closed it."""
    libc = ctypes.CDLL(None, use_errno=True)
    process = os.pidfd_open(pid)
    for descriptor in sockets_of(pid):
        same = libc.syscall(PIDFD_GETFD, process, descriptor, 0)
        if same >= 0:
            with contextlib.suppress(OSError), socket.socket(fileno=same) as connection:
                connection.shutdown(socket.SHUT_RDWR)
    os.close(process)


def sockets_of(pid: int) -> list[int]:
    """The descriptors of a process that are sockets."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(entry).startswith("socket:"):
                found.append(int(entry.name))
    return found


@dataclass
class Case:
    """A server and the fault that meets it; `number` counts the cases.

    Attributes:
        victim: the process to be struck; of two hosts there is none.
        ports: that processes listened on before the fault.
    """

    name: str
    moment: str
    fault: str
    number: int
    server: subprocess.Popen[bytes]
    hosts: TwoHosts | None
    log: Path
    victim: int | None = None
    ports: set[int] = field(default_factory=set)

    @property
    def sort(self) -> Sort:
        return SORTS[self.name]

    def aim(self) -> None:
        """Find the victim, and what must be gone in the end."""
        if self.hosts is None:
            found = victims(self.sort, self.server)
            self.victim, self.ports = found[self.number % len(found)].pid, ports_of(family())

    def strike(self) -> float:
        """Do it; when it was done."""
        if self.hosts is not None:
            self.hosts.cut()
        elif self.victim is not None and self.fault == "cut":
            until(partial(sockets_of, self.victim), START_S, "it has no connection")
            cut(self.victim)
        elif self.victim is not None:
            os.kill(self.victim, signal.SIGKILL if self.fault == "kill" else signal.SIGSTOP)
        return time.monotonic()


# ---- cases


def run_case(name: str, moment: str, fault: str, number: int) -> dict[str, Any]:
    """One fault and what came of it.

    Raises:
        AssertionError: what must not be so.
        NotPermitted: there can be no two hosts.
    """
    memory = shared_memory()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="f")))
        hosts = None
        if SORTS[name].hosts == 2:
            hosts = TwoHosts()
            stack.callback(hosts.close)
            stack.enter_context(hosts.inside(0))
        log, before = folder / "log", set(family())  # what holds a host stays
        with started(name, hosts, log) as server:
            case = Case(name, moment, fault, number, server, hosts, log)
            row = _in_loading(case) if moment == "load" else _in_service(case)
        row["says"] = _said(log.read_text(errors="replace"))
        row["gone_after_s"] = round(assert_nothing_is_left(before, case.ports), 1)
        for host in (hosts.pid(0), hosts.pid(1)) if hosts is not None else ():
            until_none(partial(listening, host), "ports")
    # What others make at the same time is open a moment later.
    until_none(lambda: shared_memory() - memory, "names of shared memory")
    return row


def _in_loading(case: Case) -> dict[str, Any]:
    """The server must end by itself: there is no request yet. Or it serves: a connection that was
    cut can be made again."""
    hosts = case.hosts

    def struck() -> set[int]:
        found = {one.pid for one in victims(case.sort, case.server)}
        return found if hosts is None else found & {*hosts.processes(1)}

    until(struck, START_S, "it does not begin")
    time.sleep(1.0 + case.number % 3)
    case.aim()
    done = case.strike()
    silent_s = SILENT_STARTING_S if case.fault == "stop" or hosts else 0.0
    until(
        lambda: case.server.poll() is not None or (case.fault == "cut" and reported_port(case.log)),
        *(silent_s + LEAVE_S, "the server neither ends nor serves"),
    )
    row = {"right": 0, "errors": 0, "ended_after_s": round(time.monotonic() - done, 1)}
    if case.server.poll() is None:
        assert ask(port_of(case.server, case.log), "/health")[0] == 200
        return {**row, "serves": True}
    assert case.server.returncode, "a server that cannot start ends with an error"
    return row


def _in_service(case: Case) -> dict[str, Any]:
    """Requests must end right or with an error."""
    sort, moment, port = case.sort, case.moment, port_of(case.server, case.log)
    begin = time.monotonic()
    known = Load(port).join()
    undisturbed_s = time.monotonic() - begin
    bound_s = END_S * max(1.0, undisturbed_s / WORK_S)
    assert all(one.is_whole for one in known), [one.error for one in known]
    if "cache.prefix_caching=true" in sort.overrides:
        until(lambda: ask(port, "/reset_prefix_cache", {})[0] == 200, 30.0, "no reset")
    case.aim()
    load = Load(port)
    if moment == "prompt":
        until(lambda: running(port) >= 1, 30.0, "no request runs")
    else:
        until(lambda: load.have_each(10), 60.0, "the requests do not run")
    if moment == "draining":
        case.server.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    in_prompt, unfinished = (sum(not x for x in xs) for xs in load.progress())
    done = case.strike()
    requests = load.join()
    last_s = max(one.end_s for one in requests) - done
    right = [one for one, other in zip(requests, known, strict=True) if _is_right(one, other)]
    errors = [one for one in requests if one.error is not None and -1 not in one.tokens]
    assert len(right) + len(errors) == CLIENTS, [one.error for one in requests]
    assert last_s > 0, "the requests were over before the fault"
    assert last_s < bound_s, f"the last request ended after {last_s:.1f} s"
    assert not sort.spare or not errors, f"others could compute it: {errors[0].error}"
    if moment != "draining":
        assert (ask(port, "/health")[0] == 200) == sort.spare
    if moment == "draining" or not sort.spare:
        case.server.wait(LEAVE_S)
    return {
        **{"in_prompt": in_prompt, "unfinished": unfinished},
        **{"right": len(right), "errors": len(errors)},
        **{"undisturbed_s": round(undisturbed_s, 1), "last_after_s": round(last_s, 1)},
        **{"error": errors[0].error if errors else None},
    }


def _is_right(one: Request, other: Request) -> bool:
    return one.is_whole and one.tokens == other.tokens


def _said(text: str) -> str:
    """The line of a log that names what was struck."""
    for pattern in (r"^(warning|error): ", r"^rank \d+ "):
        if lines := [line for line in text.splitlines() if re.search(pattern, line)]:
            return lines[0]
    return ""


# ---- the matrix


def cases(sorts: Sequence[str], moments: Sequence[str], faults: Sequence[str]) -> Iterator[Any]:
    """Each sort, moment and fault; of hosts the link alone."""
    for name in sorts:
        for moment in moments:
            for fault in faults:
                if SORTS[name].hosts == 1 or fault == "cut":
                    yield name, moment, fault


def row_of(name: str, moment: str, fault: str, number: int) -> dict[str, Any]:
    """A case as a row, with what was not so as its `failure`."""
    row: dict[str, Any] = {"sort": name, "moment": moment, "fault": fault}
    try:
        row |= run_case(name, moment, fault, number)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        row["failure"] = " ".join(str(error).split())[:600]
    except NotPermitted as error:
        row["skipped"] = f"two hosts need network namespaces: {error}"
    return {**row, "load": round(os.getloadavg()[0], 1), "code_hash": code_hash()}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text."""
    lines = ["sort        moment    fault  right errors  last (s)"]
    for row in rows:
        last = row.get("last_after_s", row.get("ended_after_s", ""))
        state = row.get("failure") or row.get("skipped") or ""
        lines.append(
            f"{row['sort']:<11} {row['moment']:<9} {row['fault']:<6} {row.get('right', ''):>5} "
            f"{row.get('errors', ''):>6} {last:>9}  {state}"
        )
    return "\n".join(lines)


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of each sort: its faults, what became of requests, and the longest times."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(row["sort"] for row in rows):
        own = [row for row in rows if row["sort"] == name and "skipped" not in row]
        sums = {word: sum(row.get(word, 0) for row in own) for word in ("right", "errors")}
        most = {
            word: max((row.get(word, 0.0) for row in own), default=0.0)
            for word in ("last_after_s", "undisturbed_s")
        }
        failures = sum("failure" in row for row in own)
        found[name] = {"faults": len(own), "failures": failures, **sums, "most": most}
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; see the module's docstring."""
    parser = new_parser(
        __doc__, help="where to keep the record, as JSON; one that is there keeps its other rows"
    )
    for word, known in (("sorts", tuple(SORTS)), ("moments", MOMENTS), ("faults", FAULTS)):
        parser.add_argument(f"--{word}", nargs="*", choices=known, default=known)
    args = parser.parse_args(arguments)
    rows: dict[str, dict[str, Any]] = {}
    if args.output is not None and args.output.exists():
        rows = json.loads(args.output.read_text(encoding="utf-8"))["rows"]
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="k") as own:  # what is left there is ours
        os.environ["TMPDIR"] = tempfile.tempdir = own
        for number, case in enumerate(cases(args.sorts, args.moments, args.faults)):
            rows["-".join(case)] = row = row_of(*case, number)
            print(json.dumps(row), file=sys.stderr, flush=True)
            if args.output is not None:
                found = {"summary": summary([*rows.values()]), "rows": rows}
                files.write_json(args.output, found)
    print(table(list(rows.values())))
    return int(any("failure" in row for row in rows.values()))


if __name__ == "__main__":
    sys.exit(exit_code(main))
